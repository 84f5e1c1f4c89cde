"""Photos of all sizes and kinds become images of one size, if asked for."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.pictures import encoded, pictures
from rankup.data import DataError, make_stream
from rankup.data.streams import stream_info

CLASSES = ("ant", "bee", "cow", "dog")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Four classes of six photos, each of another shape; those of one class are grey, those of
    another slightly transparent."""
    shapes = {"ant": (3,), "bee": (), "cow": (4,), "dog": (3,)}
    for name in CLASSES:
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for number in range(6):
            (photo,) = pictures(1, 9 + number, 7 + 2 * number, *shapes[name], seed=number)
            if photo.shape[2:] == (4,):
                photo[..., 3] = 240
            (folder / f"{number}.png").write_bytes(encoded(photo))
    return tmp_path / "photos"


def test_photos_become_rgb_of_the_size_asked_for(photos: Path) -> None:
    stream = make_stream(f"split:{photos}@8", tasks=2)
    assert {tuple(task.train_x.shape) for task in stream} == {(10, 3, 8, 8)}
    # The fifth of each class is for testing.
    photo = Image.open(photos / "bee" / "4.png").convert("RGB").resize((8, 8), Image.LANCZOS)
    wanted = np.asarray(photo).transpose(2, 0, 1)
    tested = [image for task in stream for image in task.test_x.numpy()]
    assert any(np.array_equal(image, wanted) for image in tested)


def test_refusal_says_how_to_ask_for_a_size(photos: Path) -> None:
    with pytest.raises(DataError, match=r"all must be alike: the stream split:PATH@64 converts"):
        make_stream(f"split:{photos}", tasks=2)
    for name in ("ant", "bee"):
        (photos / name).rename(photos.parent / name)
    with pytest.raises(DataError, match=r"of kind RGBA.*: the stream split:PATH@64 converts"):
        make_stream(f"split:{photos}", tasks=1)


def test_sizes_are_cached_apart_and_draw_the_same_tasks(photos: Path) -> None:
    streams = [make_stream(f"split:{photos}@{side}", tasks=2, seed=3) for side in (8, 5, 8)]
    assert [stream[0].train_x.shape[-1] for stream in streams] == [8, 5, 8]
    for small, large in zip(streams[1], streams[0], strict=True):
        assert small.train_y.tolist() == large.train_y.tolist()


def test_folder_name_may_end_like_a_size(photos: Path) -> None:
    named = photos.rename(photos.parent / "photos@8")
    assert (stream_info(f"split:{named}").side, stream_info(f"split:{named}@16").side) == (None, 16)


@pytest.mark.parametrize("side", [0, 5000])
def test_sizes_out_of_range_are_refused(side: int) -> None:
    with pytest.raises(
        DataError, match=f"scaled to 1 to 4096 pixels, got {side} in split:x@{side}"
    ):
        make_stream(f"split:x@{side}", tasks=2)

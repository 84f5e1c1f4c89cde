"""Streams, tasks and transforms: what their names say, the same for the same seed."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import Tensor

from rankup.data import STREAMS, DataError, Stream, digits, make_stream
from rankup.data.transforms import to_float


def folder_of_images(root: Path, classes: int) -> Path:
    """Images of one colour per class, so that an image tells its class."""
    for label in range(classes):
        for split, count in (("train", 3), ("test", 2)):
            folder = root / split / f"class {label:02}"
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("L", (4, 4), 10 * label).save(folder / f"{number}.png")
    return root


def digest(stream: Stream) -> str:
    """A hash of all of a stream's tasks: names, classes, data, transforms."""
    hashed = hashlib.sha256()
    for task in stream:
        hashed.update(repr((task.name, task.classes)).encode())
        for x, y in ((task.train_x, task.train_y), (task.test_x, task.test_y)):
            pixels = task.transform(to_float(x)) if task.transform else to_float(x)
            hashed.update(pixels.numpy().tobytes() + y.numpy().tobytes())
    return hashed.hexdigest()


def test_permutations_differ_and_the_first_is_the_identity() -> None:
    stream = make_stream("p-digits", seed=3)
    indices = [task.transform.index for task in stream]
    assert len(indices) == 10
    assert torch.equal(indices[0], torch.arange(64))
    for index in indices:
        assert sorted(index.tolist()) == list(range(64))
    assert len({tuple(index.tolist()) for index in indices}) == 10


def test_permuted_tasks_share_their_data(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = make_stream("p-digits", tasks=4)
    assert len({task.train_x.data_ptr() for task in stream}) == 1
    monkeypatch.setattr(Tensor, "to", lambda tensor, device: tensor.clone())  # another device
    moved = stream.to("elsewhere")
    assert {task.test_x.data_ptr() for task in moved}.isdisjoint({stream[0].test_x.data_ptr()})
    assert len({task.test_x.data_ptr() for task in moved}) == 1


def test_angles_are_spread_over_half_a_turn() -> None:
    angles = [task.transform.angle for task in make_stream("r-digits", tasks=200)]
    assert all(0 <= angle <= 180 for angle in angles)
    assert min(angles) < 5
    assert max(angles) > 175
    assert abs(np.mean(angles) - 90) < 4 * 180 / np.sqrt(12 * 200)  # four standard errors


def test_rotated_task_says_its_angle() -> None:
    for task in make_stream("r-digits"):
        assert task.name.endswith(f": {task.transform.angle:.1f}°")


@pytest.mark.parametrize(("name", "tasks"), [("s-digits", None), ("s-digits", 2)])
def test_splits_are_disjoint_and_complete(name: str, tasks: int | None) -> None:
    source, stream = digits(), make_stream(name, tasks=tasks, seed=1)
    assert len(stream) == (tasks or 5)
    classes: list[int] = []
    for part in ("train", "test"):
        split = getattr(source, part)
        images = {x.tobytes(): int(y) for x, y in zip(split.x, split.y, strict=True)}
        assert sum(len(getattr(task, f"{part}_y")) for task in stream) == len(split.y)
        for task in stream:
            x, y = getattr(task, f"{part}_x"), getattr(task, f"{part}_y")
            assert sorted(set(y.tolist())) == list(range(task.classes))
            originals = [images[image.numpy().tobytes()] for image in x]
            meaning = dict(zip(y.tolist(), originals, strict=True))
            assert [meaning[label] for label in y.tolist()] == originals
            classes += [meaning[label] for label in range(task.classes)]
    # In both splits every class is in one task, and a task's labels mean the same.
    half = len(classes) // 2
    assert sorted(classes[:half]) == list(range(10))
    assert classes[:half] == classes[half:]


def test_own_folder_is_split(tmp_path: Path) -> None:
    folder = folder_of_images(tmp_path / "mine", classes=6)
    stream = make_stream(f"split:{folder}", tasks=3, seed=0)
    colours = [{int(x.flatten()[0]) for x in task.train_x} for task in stream]
    assert sorted(colour for task in colours for colour in task) == [0, 10, 20, 30, 40, 50]
    assert [len(task) for task in colours] == [2, 2, 2]
    assert [task.name for task in stream] == ["split 01", "split 02", "split 03"]


def test_folder_location_changes_nothing(tmp_path: Path) -> None:
    one = folder_of_images(tmp_path / "one", classes=8)
    two = folder_of_images(tmp_path / "there" / "two", classes=8)
    streams = [make_stream(f"split:{folder}", tasks=4, seed=5) for folder in (one, two)]
    assert digest(streams[0]) == digest(streams[1])


@pytest.mark.parametrize(("lacking", "called"), [("train", "training"), ("test", "test")])
def test_labels_without_images_are_refused(lacking: str, called: str, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    Image.new("L", (2, 2)).save(tmp_path / "i.png")
    image = {"bytes": (tmp_path / "i.png").read_bytes(), "path": None}
    names = {"info": {"features": {"label": {"names": ["a", "b", "c", "d"]}}}}
    for split in ("train", "test"):
        labels = [0, 1, 3] if split == lacking else [0, 1, 2, 3]
        table = pa.table({"image": [image] * len(labels), "label": labels})
        table = table.replace_schema_metadata({"huggingface": json.dumps(names)})
        pq.write_table(table, tmp_path / "d" / f"{split}-00000-of-00001.parquet")
    with pytest.raises(DataError, match=f"^d has no {called} images of its class 'c'$"):
        make_stream(f"split:{tmp_path / 'd'}", tasks=2)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("p-digits", "d5590dcee69bf4ca"), ("s-digits", "44adb1dcc9c54e1f")],
)
def test_same_seed_gives_the_same_stream_everywhere(name: str, expected: str) -> None:
    assert digest(make_stream(name, seed=7))[:16] == expected
    assert digest(make_stream(name, seed=8)) != digest(make_stream(name, seed=7))


def test_same_seed_gives_the_same_angles_everywhere() -> None:
    names = [task.name for task in make_stream("r-digits", tasks=2, seed=7)]
    assert names == ["rotation 01: 3.4°", "rotation 02: 76.2°"]


def test_fewer_tasks_are_the_first_ones() -> None:
    for name in ("p-digits", "r-digits"):
        short, long = make_stream(name, tasks=2), make_stream(name, tasks=5)
        assert digest(short) == digest(Stream(name, long.tasks[:2]))


@pytest.mark.parametrize("name", ["p-digits", "r-digits", "s-digits"])
def test_task_names_are_short_and_unique(name: str) -> None:
    names = [task.name for task in make_stream(name)]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 24 and "/" not in name for name in names)


def test_stream_is_a_sequence() -> None:
    stream = make_stream("s-digits")
    assert list(stream) == [stream[index] for index in range(len(stream))]


def test_listing_streams_needs_no_torch() -> None:
    code = "import sys; from rankup.data import STREAMS; print(*STREAMS, *sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    listed = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert "s-miniimagenet" in listed.stdout.split()
    heavy = {"torch", "numpy", "pyarrow", "PIL", "sklearn", "rich"}
    assert heavy.isdisjoint(listed.stdout.split())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_stream("p-minst"), r"no stream 'p-minst' \(did you mean p-mnist\?\): exp"),
        (lambda: make_stream("zzz"), "no stream 'zzz': expected one of p-digits, .*split:PATH"),
        (lambda: make_stream("split:"), "no stream 'split:'"),
        (lambda: make_stream("p-digits", tasks=0), "at least 1, got 0"),
        (lambda: make_stream("p-digits", tasks=-2), "at least 1, got -2"),
        (lambda: make_stream("p-digits", tasks=2.5), "whole number of at least 1, got 2.5"),
        (lambda: make_stream("p-digits", tasks=True), "whole number of at least 1, got True"),
        (lambda: make_stream("p-digits", seed="a"), "seed must be a whole number, got 'a'"),
        (
            lambda: make_stream("s-digits", tasks=3),
            "the 10 classes of digits cannot be divided evenly among 3 tasks .*possible: 1, 2, 5$",
        ),
        (
            lambda: make_stream("s-digits", tasks=10),
            "at least 2 classes each; possible: 1, 2, 5",
        ),
        (lambda: make_stream("split:somewhere"), "split:somewhere needs a number of tasks"),
        (lambda: make_stream("split:nowhere", tasks=2), "no data set 'nowhere': expected digits"),
        (lambda: make_stream("p-mnist"), "mnist is not in .*--data PATH or RANKUP_DATA"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(call: object, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_every_stream_is_described() -> None:
    for info in STREAMS.values():
        assert info.description
        assert "\n" not in info.description
    defaults = {name: info.tasks for name, info in STREAMS.items()}
    assert defaults == {
        "p-digits": 10,
        "r-digits": 10,
        "s-digits": 5,
        "p-mnist": 20,
        "r-mnist": 20,
        "s-mnist": 5,
        "s-cifar100": 20,
        "s-miniimagenet": 20,
    }


def test_streams_and_tasks_print_in_a_line() -> None:
    stream = make_stream("p-digits")
    assert repr(stream) == "Stream('p-digits', 10 tasks)"
    assert repr(Stream("mine", stream.tasks[:1])) == "Stream('mine', 1 task)"
    samples = "1,442 training and 355 test samples of [1, 8, 8]"
    assert repr(stream[0]) == f"Task('permutation 01', 10 classes, {samples})"

"""Files that are no data: pipes, devices, files of many GB, and damage in the cache."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from PIL import Image

from helpers.pictures import assert_same, hub_folder, image_folder
from rankup.data import DataError, cache, load_source
from rankup.data.cache import cache_folder
from rankup.runs import predict

pytestmark = pytest.mark.skipif(os.name != "posix", reason="pipes are of POSIX")

STRANGE = {
    "a pipe": "it is a pipe or a device, not a regular file",
    "a link to a pipe": "it is a pipe or a device, not a regular file",
    "a device": "it is a pipe or a device, not a regular file",
    "many GB": "it has 6,442,450,944 bytes, more than 268,435,456",
}


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    """Fail instead of waiting for a pipe, or for many GB to be read."""

    def late(number: int, frame: FrameType | None) -> None:
        pytest.fail("it took too long")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 10)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def put(kind: str, file: Path) -> None:
    """Put something else in the place of a file."""
    file.unlink(missing_ok=True)
    match kind:
        case "a pipe":
            os.mkfifo(file)
        case "a link to a pipe":
            pipe = file.with_suffix(".pipe")
            os.mkfifo(pipe)
            file.symlink_to(pipe)
        case "a device":
            file.symlink_to("/dev/zero")
        case "many GB":
            with open(file, "wb") as opened:
                opened.truncate(6 << 30)  # without taking any room


@pytest.mark.parametrize("kind", [kind for kind in STRANGE if kind != "a pipe"])
@pytest.mark.parametrize("side", [None, 8])
def test_image_must_be_a_file_of_some_size(kind: str, side: int | None, tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "bugs")
    put(kind, folder / "bee" / "03.png")
    with pytest.raises(DataError) as caught:
        load_source(str(folder), side=side)
    assert str(caught.value) == f"{folder / 'bee' / '03.png'} cannot be read: {STRANGE[kind]}"


def test_image_is_decoded_by_no_other_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = image_folder(tmp_path / "bugs")
    file = folder / "ant" / "00.png"
    Image.open(file).save(file, "EPS")
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_: pytest.fail("it was run"))
    with pytest.raises(DataError, match="00.png: the image is broken or in an unknown format"):
        load_source(str(folder))


@pytest.mark.parametrize("kind", STRANGE)
def test_image_to_predict_must_be_a_file(kind: str, tmp_path: Path) -> None:
    put(kind, tmp_path / "a.png")
    with pytest.raises(DataError) as caught:
        predict._read([tmp_path / "a.png"], None, (3, 4, 4))
    assert str(caught.value) == f"{tmp_path / 'a.png'} cannot be read: {STRANGE[kind]}"


@pytest.mark.parametrize("kind", STRANGE)
def test_parquet_must_be_a_file_of_its_kind(kind: str, tmp_path: Path) -> None:
    file = hub_folder(tmp_path) / "data" / "train-00001-of-00002.parquet"
    put(kind, file)
    reason = "it does not begin and end like one" if kind == "many GB" else STRANGE[kind]
    with pytest.raises(DataError) as caught:
        load_source(str(tmp_path))
    assert str(caught.value) == f"{file} cannot be read as a parquet file: {reason}"


def test_number_of_parquet_files_may_be_any(tmp_path: Path) -> None:
    folder = hub_folder(tmp_path) / "data"
    (folder / "train-00001-of-00002.parquet").unlink()
    (folder / "train-00000-of-00002.parquet").rename(folder / "train-00000-of-1000000000.parquet")
    with pytest.raises(DataError, match="train-…-of-1000000000.parquet, number 00001 is missing"):
        load_source(str(tmp_path))


def entry(name: str) -> Path:
    [file] = (cache_folder() / "decoded").glob(f"*/{name}")
    return file


@pytest.mark.parametrize("name", ["about.json", "train_x.npy", "test_y.npy"])
@pytest.mark.parametrize("kind", STRANGE)
def test_cache_with_no_file_is_made_again(name: str, kind: str, tmp_path: Path) -> None:
    folder = hub_folder(tmp_path / "bugs")
    expected = load_source(str(folder))
    content = entry(name).read_bytes()
    put(kind, entry(name))
    assert_same(load_source(str(folder)), expected)
    assert entry(name).read_bytes() == content


def edit(name: str, kind: str) -> None:
    file = entry(name)
    content = bytearray(file.read_bytes())
    match kind:
        case "one bit":
            content[-1] ^= 1
        case "label":
            content[-8:] = np.int64(7).tobytes()
        case "class":
            content[:] = content.replace(b'"bee"', b'"bed"')
        case "key":
            content[:] = content.replace(file.parent.name.encode(), b"0" * 32)
    file.write_bytes(content)


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("train_x.npy", "one bit"),
        ("test_x.npy", "one bit"),
        ("train_y.npy", "label"),
        ("about.json", "class"),
        ("about.json", "key"),
    ],
)
def test_edited_cache_is_made_again(
    name: str, kind: str, fresh: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hub_folder(tmp_path / "bugs")
    expected = load_source(str(folder))
    content = entry(name).read_bytes()
    edit(name, kind)
    assert entry(name).read_bytes() != content
    if fresh:  # as in another process, even if the disk's times do not tell
        monkeypatch.setattr(cache, "_intact", {})
    source = load_source(str(folder))
    assert entry(name).read_bytes() == content
    assert source.class_names == expected.class_names == ("ant", "bee", "cow")
    # The map of what was loaded before may show the edited file.
    np.testing.assert_array_equal(source.train.y, [0, 1, 2] * 4)


def test_labels_outside_the_classes_are_not_loaded(tmp_path: Path) -> None:
    folder = hub_folder(tmp_path / "bugs")
    load_source(str(folder))
    edit("test_y.npy", "label")
    about = json.loads(entry("about.json").read_bytes())
    del about["sha256"]
    about["arrays"]["test_y"][1] = cache.hash_regular(entry("test_y.npy"))
    entry("about.json").write_text(json.dumps({**about, "sha256": cache.seal(about)}))
    assert load_source(str(folder)).test.y.max() == 2


def test_cache_is_hashed_once_per_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub_folder(tmp_path / "bugs")
    expected = load_source(str(folder))
    with monkeypatch.context() as then:
        then.setattr(cache, "hash_regular", lambda file: pytest.fail(f"{file} was read"))
        assert_same(load_source(str(folder)), expected)


@pytest.mark.parametrize("damage", ["a pipe", "many GB", "key", "list"])
def test_remembered_key_is_checked(damage: str, tmp_path: Path) -> None:
    folder = hub_folder(tmp_path / "bugs")
    for file in folder.rglob("*.parquet"):
        os.utime(file, ns=(10**18, 10**18))
    expected = load_source(str(folder))
    [memory] = (cache_folder() / "sources").iterdir()
    content = memory.read_text()
    if damage in STRANGE:
        put(damage, memory)
    else:
        key = json.loads(content)["key"]
        memory.write_text("[]" if damage == "list" else content.replace(key, ".."))
    assert_same(load_source(str(folder)), expected)
    assert memory.read_text() == content

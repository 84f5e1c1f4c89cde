"""Cache of decoded data: decoded once, whatever happens meanwhile."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.bars import FakeBar
from helpers.pictures import (
    assert_same,
    encoded,
    hub_folder,
    image_folder,
    pictures,
    start,
    write_parquet,
)
from rankup.data import DataError, cache, decode, load_source
from rankup.data.cache import cache_folder
from rankup.utils import progress as progress_bars


def test_images_are_decoded_once(tmp_path: Path, decodes: list[str]) -> None:
    folder = hub_folder(tmp_path / "bugs")
    first = load_source(str(folder))
    assert len(set(decodes)) == 18
    decodes.clear()
    second = load_source(str(folder))
    assert decodes == []
    assert_same(first, second)
    for array in (second.train.x, second.test.y):
        assert isinstance(array, np.memmap)
        assert not array.flags.writeable


def test_copy_elsewhere_is_not_decoded_again(tmp_path: Path, decodes: list[str]) -> None:
    load_source(str(hub_folder(tmp_path / "one")))
    decodes.clear()
    assert load_source(str(hub_folder(tmp_path / "two"))).name == "two"
    assert decodes == []


def settle(folder: Path) -> None:
    """Make files old enough for their timestamps to be trusted."""
    for file in folder.rglob("*.*"):
        os.utime(file, ns=(10**18, 10**18))


def test_unchanged_files_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hub_folder(tmp_path / "bugs")
    settle(folder)
    source = load_source(str(folder))
    monkeypatch.setattr(cache, "_content", lambda *_: pytest.fail("the files were read"))
    assert_same(load_source(str(folder)), source)


def test_recently_changed_files_are_read_again(tmp_path: Path) -> None:
    load_source(str(hub_folder(tmp_path / "bugs")))
    assert not (cache_folder() / "sources").exists()


@pytest.mark.parametrize("kind", ["parquet", "images"])
def test_change_of_same_size_and_time_is_noticed(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "bugs"
    # PPM holds raw pixels: other pixels make a file of the same size.
    if kind == "parquet":
        hub_folder(folder)
        file = folder / "data" / "test-00000-of-00001.parquet"
        write_parquet(file, [encoded(p, "PPM") for p in pictures(6, 5, 4)], [0] * 6)
    else:
        image_folder(folder)
        for file in folder.rglob("*.png"):
            file.with_suffix(".ppm").write_bytes(encoded(np.asarray(Image.open(file)), "PPM"))
            file.unlink()
        file = folder / "bee" / "04.ppm"
    settle(folder)
    old = load_source(str(folder))
    content = bytearray(file.read_bytes())
    pixels = np.ascontiguousarray(old.test.x[-1].transpose(1, 2, 0)).tobytes()
    at = content.index(pixels)
    content[at : at + len(pixels)] = bytes(255 - pixel for pixel in pixels)
    size = file.stat().st_size
    file.write_bytes(content)
    settle(folder)
    assert file.stat().st_size == size
    new = load_source(str(folder))
    np.testing.assert_array_equal(new.test.x[-1], 255 - old.test.x[-1])
    np.testing.assert_array_equal(new.test.x[:-1], old.test.x[:-1])


def test_older_cache_version_is_decoded_anew(
    tmp_path: Path, decodes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hub_folder(tmp_path / "bugs")
    settle(folder)
    with monkeypatch.context() as then:
        then.setattr(cache, "_VERSION", 2)
        load_source(str(folder))
    decodes.clear()
    load_source(str(folder))
    assert len(set(decodes)) == 18


def test_renamed_class_is_noticed(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "bugs")
    load_source(str(folder))
    (folder / "ant").rename(folder / "auk")  # the images stay the same, and their order
    assert load_source(str(folder)).class_names == ("auk", "bee")


def test_source_that_changes_while_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = image_folder(tmp_path / "bugs")
    write = cache._write

    def meddled(*args: object) -> None:
        (folder / "ant" / "00.png").write_bytes(encoded(pictures(1, 4, 4, 3, seed=9)[0]))
        write(*args)

    monkeypatch.setattr(cache, "_write", meddled)
    with pytest.raises(DataError, match="bugs changed while it was being read: try again"):
        load_source(str(folder))
    monkeypatch.undo()
    monkeypatch.setenv("RANKUP_CACHE", str(tmp_path / "cache"))
    expected = pictures(1, 4, 4, 3, seed=9)[0].transpose(2, 0, 1)
    np.testing.assert_array_equal(load_source(str(folder)).train.x[0], expected)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("train_x.npy", "cut"),
        ("test_y.npy", "gone"),
        ("about.json", "empty"),
        ("about.json", "garbage"),
        ("train_x.npy", "another array"),
    ],
)
def test_damaged_cache_is_made_again(tmp_path: Path, name: str, damage: str) -> None:
    folder = hub_folder(tmp_path / "bugs")
    expected = load_source(str(folder))
    [file] = (cache_folder() / "decoded").glob(f"*/{name}")
    content = file.read_bytes()
    file.unlink()
    if damage == "another array":
        with open(file, "wb") as opened:
            np.save(opened, np.zeros((2, 1, 5, 4), dtype=np.uint8))
    elif damage != "gone":
        damaged = {"cut": content[:-1], "empty": b"", "garbage": b"garbage"}
        file.write_bytes(damaged[damage])
    assert_same(load_source(str(folder)), expected)
    assert file.read_bytes() == content


def read_only(tmp_path: Path) -> Path:
    """A folder that nobody can make, whoever runs the tests."""
    (tmp_path / "file").write_text("in the way")
    return tmp_path / "file" / "cache"


def test_unwritable_cache_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub_folder(tmp_path / "bugs")
    settle(folder)
    expected = load_source(str(folder))
    monkeypatch.setenv("RANKUP_CACHE", str(read_only(tmp_path)))
    with pytest.warns(UserWarning, match="cannot be written .*bugs is decoded in memory") as caught:
        source = load_source(str(folder))
    assert len(caught) == 1
    assert_same(source, expected)


def test_read_only_cache_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decodes: list[str]
) -> None:
    folder = hub_folder(tmp_path / "bugs")
    settle(folder)
    expected = load_source(str(folder))
    decodes.clear()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    for name in ("mkdir", "write_text", "write_bytes"):
        monkeypatch.setattr(Path, name, refuse)
    monkeypatch.setattr("filelock.FileLock", refuse)
    assert_same(load_source(str(folder)), expected)
    assert decodes == []


def test_full_disk_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "_to_disk", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        source = load_source(str(hub_folder(tmp_path / "bugs")))
    np.testing.assert_array_equal(source.train.x, pictures(12, 5, 4)[:, None])
    assert not list((cache_folder() / "decoded").glob("*.npy"))
    assert not list((cache_folder() / "decoded").glob(".*.tmp"))


LOAD = """
    import hashlib, sys, time
    import PIL.Image, pyarrow.parquet
    from rankup.data import decode, load_source

    pixels, count = decode.pixels_of, 0

    def slow(*args):
        global count
        count += 1
        time.sleep(float(sys.argv[2]))
        return pixels(*args)

    decode.pixels_of = slow
    print("ready", flush=True)
    sys.stdin.readline()
    source = load_source(sys.argv[1], progress=False)
    print(count, hashlib.sha256(source.train.x.tobytes() + source.test.x.tobytes()).hexdigest())
"""


def begin(process: subprocess.Popen[str]) -> None:
    """Let a waiting process go on."""
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def test_processes_that_start_together_decode_once(tmp_path: Path) -> None:
    folder = hub_folder(tmp_path / "bugs")
    running = [start(LOAD, folder, 0.03) for _ in range(2)]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in running:
        begin(process)
    ended = [process.communicate(timeout=60) for process in running]
    assert [process.returncode for process in running] == [0, 0], ended
    results = [output.split() for output, _ in ended]
    assert len({digest for _, digest in results}) == 1
    # One decodes all 18 images; each may decode the first, to see its size.
    counts = sorted(int(count) for count, _ in results)
    assert counts[0] <= 1
    assert counts[1] == 19


def test_killed_decode_is_not_taken_for_whole(tmp_path: Path) -> None:
    folder = hub_folder(tmp_path / "bugs")
    decoded = cache_folder() / "decoded"
    process = start(LOAD, folder, 0.2)  # over three seconds of decoding
    assert process.stdout is not None
    process.stdout.readline()
    begin(process)
    while not list(decoded.glob(".*.tmp/train_x.npy")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert [entry.suffix for entry in decoded.iterdir() if entry.is_dir()] == [".tmp"]
    source = load_source(str(folder))
    np.testing.assert_array_equal(source.train.x, pictures(12, 5, 4)[:, None])
    assert not list(decoded.glob(".*.tmp"))


def test_images_keep_their_order_over_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "_GROUP", 3)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    source = load_source(str(hub_folder(tmp_path / "bugs", train=100)))
    np.testing.assert_array_equal(source.train.x, pictures(100, 5, 4)[:, None])


def test_failed_decode_ends_its_threads(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "bugs")
    (folder / "bee" / "03.png").write_bytes(b"broken")
    before = threading.active_count()
    with pytest.raises(DataError):
        load_source(str(folder))
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"RANKUP_CACHE": "/c", "XDG_CACHE_HOME": "/x"}, "/c"),
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/rankup"),
        ("linux", {}, "/home/me/.cache/rankup"),
        ("darwin", {"XDG_CACHE_HOME": "/x"}, "/home/me/Library/Caches/rankup"),
        ("win32", {"LOCALAPPDATA": "/l"}, "/l/rankup"),
    ],
)
def test_cache_is_where_the_platform_keeps_caches(
    platform: str, variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANKUP_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert cache_folder() == Path(expected)


@pytest.mark.parametrize(
    ("patience", "progress", "bars"), [(0.0, True, 1), (0.0, False, 0), (60.0, True, 0)]
)
def test_progress_bar_appears_when_it_takes_long(
    patience: float, progress: bool, bars: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_bars, "_DELAY", patience)
    monkeypatch.setattr(decode, "_GROUP", 4)
    monkeypatch.setattr(FakeBar, "made", [])
    monkeypatch.setattr("rich.progress.Progress", FakeBar)
    load_source(str(hub_folder(tmp_path / "bugs")), progress=progress)
    assert len(FakeBar.made) == bars
    for bar in FakeBar.made:
        assert (bar.title, bar.total, bar.stopped) == ("Decoding bugs", 18, True)
        assert bar.completed == [4, 8, 12, 16, 18]

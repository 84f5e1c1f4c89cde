"""Sources are read right or refused in one sentence, and decoded once."""

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rankup.data import DataError, cache, decode, digits, hub, load_source
from rankup.data.cache import cache_folder
from rankup.data.sources import Source

Pictures = npt.NDArray[np.uint8]


def pictures(count: int, *shape: int, seed: int = 0) -> Pictures:
    """`[N, H, W]` or `[N, H, W, 3]`, as PIL takes them."""
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def encoded(pixels: Pictures, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def write_parquet(
    file: Path,
    images: list[bytes | None],
    labels: list[int | None],
    *,
    columns: tuple[str, str] = ("image", "label"),
    names: list[str] | None = None,
) -> None:
    """A file as the Hub serves it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = pa.array([{"bytes": image, "path": None} for image in images], type=kind)
    table = pa.table({columns[0]: rows, columns[1]: pa.array(labels, type=pa.int64())})
    if names is not None:
        label = {"names": names, "_type": "ClassLabel"}
        info = {"info": {"features": {columns[0]: {"_type": "Image"}, columns[1]: label}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(info)})
    pq.write_table(table, file)


def hub_folder(root: Path, *, seed: int = 0, train: int = 12, where: str = "data") -> Path:
    """A small data set of 3 classes in the Hub's layout, its training images in two files."""
    names = ["ant", "bee", "cow"]
    for split, count in (("train", train), ("test", 6)):
        images = [encoded(image) for image in pictures(count, 5, 4, seed=seed)]
        labels = [number % 3 for number in range(count)]
        shards = 2 if split == "train" else 1
        for shard in range(shards):
            part = slice(shard * count // shards, (shard + 1) * count // shards)
            file = root / where / f"{split}-{shard:05}-of-{shards:05}.parquet"
            write_parquet(file, images[part], labels[part], names=names)
    return root


def image_folder(root: Path, *splits: str, count: int = 5) -> Path:
    for number, name in enumerate(("ant", "bee")):
        for split in splits or ("",):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index, image in enumerate(pictures(count, 4, 4, 3, seed=number)):
                (folder / f"{index:02}.png").write_bytes(encoded(image))
    return root


def assert_same(one: Source, two: Source) -> None:
    assert one.class_names == two.class_names
    for a, b in ((one.train, two.train), (one.test, two.test)):
        np.testing.assert_array_equal(a.x, b.x)
        np.testing.assert_array_equal(a.y, b.y)


def start(code: str, *args: object) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.Popen(command, env=env, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKUP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RANKUP_DATA", raising=False)


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Where each image came from that was decoded."""
    seen: list[str] = []
    pixels = decode._pixels

    def counted(image: bytes | None, where: str, side: int | None) -> Pictures:
        seen.append(where)
        return pixels(image, where, side)

    monkeypatch.setattr(decode, "_pixels", counted)
    return seen


# Sources


def test_digits_are_split_by_class_and_no_image_is_in_both_parts() -> None:
    source = digits()
    for split in (source.train, source.test):
        assert (split.x.dtype, split.y.dtype) == (np.uint8, np.int64)
        assert split.x.shape == (len(split.y), 1, 8, 8)
    counts = [np.bincount(split.y, minlength=10) for split in (source.train, source.test)]
    assert len(source.train.y) + len(source.test.y) == 1797
    assert np.all(np.abs(counts[1] / (counts[0] + counts[1]) - 0.2) < 0.005)
    train = {image.tobytes() for image in source.train.x}
    assert train.isdisjoint(image.tobytes() for image in source.test.x)
    assert (source.train.x.min(), source.train.x.max()) == (0, 255)
    assert_same(source, digits())


@pytest.mark.parametrize("where", ["data", ".", "plain_text"])
def test_parquet_in_the_hubs_layout(tmp_path: Path, where: str) -> None:
    source = load_source(str(hub_folder(tmp_path / "bugs", where=where)))
    assert source.name == "bugs"
    assert source.class_names == ("ant", "bee", "cow")
    np.testing.assert_array_equal(source.train.x, pictures(12, 5, 4)[:, None])
    np.testing.assert_array_equal(source.test.x, pictures(6, 5, 4)[:, None])
    assert source.train.y.tolist() == [0, 1, 2] * 4
    assert source.train.y.dtype == np.int64


def test_cifars_columns_lossless_webp_and_no_class_names(tmp_path: Path) -> None:
    images = pictures(4, 6, 6, 3)
    content = [encoded(image, "WEBP", lossless=True) for image in images]
    for split in ("train", "validation"):
        file = tmp_path / "data" / f"{split}-00000-of-00001.parquet"
        write_parquet(file, content, [0, 3, 1, 2], columns=("img", "fine_label"))
    source = load_source(str(tmp_path))
    np.testing.assert_array_equal(source.test.x, images.transpose(0, 3, 1, 2))
    assert source.class_names == ("0", "1", "2", "3")


def test_the_test_split_comes_before_the_validation_split(tmp_path: Path) -> None:
    hub_folder(tmp_path)
    file = tmp_path / "data" / "validation-00000-of-00001.parquet"
    write_parquet(file, [encoded(pictures(1, 5, 4)[0])], [0], names=["ant", "bee", "cow"])
    assert len(load_source(str(tmp_path)).test.y) == 6


def test_image_folders_with_splits(tmp_path: Path) -> None:
    source = load_source(str(image_folder(tmp_path, "train", "test")))
    assert source.class_names == ("ant", "bee")
    assert source.train.y.tolist() == source.test.y.tolist() == [0] * 5 + [1] * 5
    expected = np.concatenate([pictures(5, 4, 4, 3, seed=seed) for seed in (0, 1)])
    np.testing.assert_array_equal(source.train.x, expected.transpose(0, 3, 1, 2))


def test_of_image_folders_without_splits_every_fifth_is_for_testing(tmp_path: Path) -> None:
    source = load_source(str(image_folder(tmp_path, count=11)))
    ants = pictures(11, 4, 4, 3).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(source.test.x[:2], ants[[4, 9]])
    np.testing.assert_array_equal(source.train.x[:9], np.delete(ants, [4, 9], axis=0))
    assert source.test.y.tolist() == [0, 0, 1, 1]


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    image_folder(tmp_path)
    (tmp_path / "ant").rename(tmp_path / "train")
    assert load_source(str(tmp_path)).class_names == ("bee", "train")


def test_hidden_and_other_files_are_no_images(tmp_path: Path) -> None:
    image_folder(tmp_path)
    (tmp_path / "ant" / "notes.txt").write_text("six legs")
    (tmp_path / "ant" / "._00.png").write_text("not an image")
    (tmp_path / ".git").mkdir()
    assert len(load_source(str(tmp_path)).train.y) == 8


def test_palettes_become_rgb_and_bitmaps_grey(tmp_path: Path) -> None:
    for mode, channels in (("P", 3), ("1", 1)):
        root = image_folder(tmp_path / mode)
        for file in root.rglob("*.png"):
            Image.open(file).convert(mode).save(file)
        assert load_source(str(root)).train.x.shape[1] == channels


def test_mini_imagenet_is_brought_to_84_pixels_and_rgb(tmp_path: Path) -> None:
    images = [
        encoded(pictures(1, 100, 120, 3)[0], "JPEG"),
        encoded(pictures(1, 90, 60)[0], "JPEG"),
        encoded(exact := pictures(1, 84, 84, 3)[0]),
    ]
    for split, times in (("train", 2), ("validation", 1), ("test", 3)):
        file = tmp_path / "mini-imagenet" / "data" / f"{split}-00000-of-00001.parquet"
        write_parquet(file, images * times, [0, 1, 2] * times)
    source = load_source("mini-imagenet", data=tmp_path)
    assert source.train.x.shape == (6, 3, 84, 84)
    assert len(source.test.y) == 3  # the validation split
    np.testing.assert_array_equal(source.train.x[2], exact.transpose(2, 0, 1))


# Where data is


def test_named_data_is_looked_for_where_the_caller_or_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_folder(tmp_path / "given" / "mnist")
    hub_folder(tmp_path / "set" / "mnist", train=6)
    monkeypatch.setenv("RANKUP_DATA", str(tmp_path / "set"))
    assert len(load_source("mnist").train.y) == 6
    source = load_source("mnist", data=tmp_path / "given")
    assert len(source.train.y) == 12
    assert source.name == "mnist"


def test_missing_data_says_where_it_was_looked_for_and_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_source("cifar100", data=tmp_path)
    assert str(caught.value) == (
        f"cifar100 is not in {tmp_path / 'cifar100'}: say which folder it lies in with --data PATH "
        "or RANKUP_DATA, or fetch it from the Hugging Face Hub with --download"
    )


def fake_hub(monkeypatch: pytest.MonkeyPatch, answer: object) -> list[str]:
    """Stands in for the Hub's client; says what was asked for."""
    asked = []

    def snapshot_download(repository: str, **options: object) -> None:
        asked.append(repository)
        assert options["repo_type"] == "dataset"
        assert all(pattern.endswith("-*.parquet") for pattern in options["allow_patterns"])
        answer(Path(options["local_dir"]))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return asked


def test_a_download_happens_only_when_asked_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = fake_hub(monkeypatch, lambda folder: hub_folder(folder, where="mnist"))
    with pytest.raises(DataError, match="--download"):
        load_source("mnist")
    assert asked == []
    source = load_source("mnist", download=True)
    assert asked == ["ylecun/mnist"]
    assert_same(load_source("mnist"), source)
    assert_same(load_source("mnist", download=True), source)
    assert asked == ["ylecun/mnist"]


def test_no_network_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        raise ConnectionError("Name or service not known\nand much more")

    fake_hub(monkeypatch, fail)
    with pytest.raises(DataError) as caught:
        load_source("cifar100", download=True)
    assert str(caught.value) == (
        "uoft-cs/cifar100 could not be downloaded from the Hugging Face Hub: Name or service not "
        "known"
    )


def test_an_interrupted_download_is_not_taken_for_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(folder: Path) -> None:
        hub_folder(folder, where="mnist")
        (folder / "mnist" / "train-00001-of-00002.parquet").unlink()

    fake_hub(monkeypatch, interrupted)
    with pytest.raises(DataError, match="not complete: .* number 00001 is missing"):
        load_source("mnist", download=True)
    fake_hub(monkeypatch, lambda folder: hub_folder(folder, where="mnist"))
    assert len(load_source("mnist", download=True).train.y) == 12


def test_all_named_data_sets_are_on_the_hub() -> None:
    assert {name: named.repository for name, named in hub.NAMED.items()} == {
        "mnist": "ylecun/mnist",
        "cifar100": "uoft-cs/cifar100",
        "mini-imagenet": "timm/mini-imagenet",
    }


# The cache


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


def test_a_copy_elsewhere_is_the_same_data(tmp_path: Path, decodes: list[str]) -> None:
    load_source(str(hub_folder(tmp_path / "one")))
    decodes.clear()
    assert load_source(str(hub_folder(tmp_path / "two"))).name == "two"
    assert decodes == []


def settle(folder: Path) -> None:
    """Give files the age at which their times can be trusted."""
    for file in folder.rglob("*.*"):
        os.utime(file, ns=(10**18, 10**18))


def test_files_that_did_not_change_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hub_folder(tmp_path / "bugs")
    settle(folder)
    source = load_source(str(folder))
    monkeypatch.setattr(cache, "_content", lambda *_: pytest.fail("the files were read"))
    assert_same(load_source(str(folder)), source)


def test_files_that_changed_a_moment_ago_are_read_again(tmp_path: Path) -> None:
    load_source(str(hub_folder(tmp_path / "bugs")))
    assert not (cache_folder() / "sources").exists()


@pytest.mark.parametrize("kind", ["parquet", "images"])
def test_a_changed_source_is_noticed_even_with_its_old_size_and_time(
    tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "bugs"
    # PPM holds the pixels as they are: others make a file of the same size.
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


def test_a_renamed_class_is_noticed(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "bugs")
    load_source(str(folder))
    (folder / "ant").rename(folder / "auk")  # the images stay the same, and their order
    assert load_source(str(folder)).class_names == ("auk", "bee")


def test_a_source_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = image_folder(tmp_path / "bugs")
    write = cache._write

    def meddled(*args: object) -> None:
        (folder / "ant" / "00.png").write_bytes(encoded(pictures(1, 4, 4, 3, seed=9)[0]))
        write(*args)

    monkeypatch.setattr(cache, "_write", meddled)
    with pytest.raises(DataError, match="bugs changed while it was read: try again"):
        load_source(str(folder))
    monkeypatch.undo()
    monkeypatch.setenv("RANKUP_CACHE", str(tmp_path / "cache"))
    expected = pictures(1, 4, 4, 3, seed=9)[0].transpose(2, 0, 1)
    np.testing.assert_array_equal(load_source(str(folder)).train.x[0], expected)


@pytest.mark.parametrize("name", ["train_x.npy", "test_y.npy", "about.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "garbage", "another array"])
def test_a_damaged_cache_is_made_again(tmp_path: Path, name: str, damage: str) -> None:
    folder = hub_folder(tmp_path / "bugs")
    expected = load_source(str(folder))
    [file] = (cache_folder() / "decoded").glob(f"*/{name}")
    content = file.read_bytes()
    file.unlink()
    if damage == "another array":
        with open(file, "wb") as opened:
            np.save(opened, np.zeros((2, 1, 5, 4), dtype=np.uint8))
    elif damage != "gone":
        file.write_bytes(content[:-1] if damage == "cut" else b"garbage")
    assert_same(load_source(str(folder)), expected)
    assert file.read_bytes() == content


def read_only(tmp_path: Path) -> Path:
    """A folder that nobody can make, whoever runs the tests."""
    (tmp_path / "file").write_text("in the way")
    return tmp_path / "file" / "cache"


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hub_folder(tmp_path / "bugs")
    settle(folder)
    expected = load_source(str(folder))
    monkeypatch.setenv("RANKUP_CACHE", str(read_only(tmp_path)))
    with pytest.warns(UserWarning, match="cannot be written .*bugs is decoded in memory") as caught:
        source = load_source(str(folder))
    assert len(caught) == 1
    assert_same(source, expected)


def test_a_read_only_cache_that_has_the_data_is_used(
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


def test_a_full_disk_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    pixels, count = decode._pixels, 0

    def slow(*args):
        global count
        count += 1
        time.sleep(float(sys.argv[2]))
        return pixels(*args)

    decode._pixels = slow
    print("ready", flush=True)
    sys.stdin.readline()
    source = load_source(sys.argv[1], progress=False)
    print(count, hashlib.sha256(source.train.x.tobytes() + source.test.x.tobytes()).hexdigest())
"""


def begin(process: subprocess.Popen[str]) -> None:
    """Let a process go on that is ready."""
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def test_processes_that_start_at_once_decode_once_and_all_get_it_right(tmp_path: Path) -> None:
    folder = hub_folder(tmp_path / "bugs")
    running = [start(LOAD, folder, 0.03) for _ in range(3)]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in running:
        begin(process)
    ended = [process.communicate(timeout=60) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], ended
    results = [output.split() for output, _ in ended]
    assert len({digest for _, digest in results}) == 1
    # One decodes all 18 images; everyone may look at the first, to see its size.
    counts = sorted(int(count) for count, _ in results)
    assert counts[2] == 19
    assert counts[1] <= 1


def test_a_killed_decode_leaves_nothing_that_is_taken_for_whole(tmp_path: Path) -> None:
    folder = hub_folder(tmp_path / "bugs")
    decoded = cache_folder() / "decoded"
    for delay in (0.0, 0.1, 0.3):
        process = start(LOAD, folder, 0.2)  # over three seconds of decoding
        assert process.stdout is not None
        process.stdout.readline()
        begin(process)
        while not list(decoded.glob(".*.tmp/train_x.npy")):
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert [entry.suffix for entry in decoded.iterdir() if entry.is_dir()] == [".tmp"]
    source = load_source(str(folder))
    np.testing.assert_array_equal(source.train.x, pictures(12, 5, 4)[:, None])
    assert not list(decoded.glob(".*.tmp"))


def test_images_keep_their_order_over_many_groups_and_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "_GROUP", 3)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    source = load_source(str(hub_folder(tmp_path / "bugs", train=100)))
    np.testing.assert_array_equal(source.train.x, pictures(100, 5, 4)[:, None])


def test_a_failed_decode_ends_its_threads(tmp_path: Path) -> None:
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
def test_the_cache_is_where_the_platform_keeps_caches(
    platform: str, variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANKUP_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert cache_folder() == Path(expected)


class FakeBar:
    """Stands in for rich's bar and notes what it is told."""

    made: list["FakeBar"] = []  # noqa: RUF012
    task_ids = (0,)

    def __init__(self, **options: object) -> None:
        self.completed: list[int] = []
        self.made.append(self)

    def add_task(self, title: str, total: int) -> None:
        self.title, self.total = title, total

    def start(self) -> None: ...

    def stop(self) -> None:
        self.stopped = True

    def update(self, task: int, completed: int) -> None:
        self.completed.append(completed)


@pytest.mark.parametrize(
    ("patience", "progress", "bars"), [(0.0, True, 1), (0.0, False, 0), (60.0, True, 0)]
)
def test_a_bar_appears_when_it_takes_long(
    patience: float, progress: bool, bars: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "_PATIENCE", patience)
    monkeypatch.setattr(decode, "_GROUP", 4)
    monkeypatch.setattr(FakeBar, "made", [])
    monkeypatch.setattr("rich.progress.Progress", FakeBar)
    load_source(str(hub_folder(tmp_path / "bugs")), progress=progress)
    assert len(FakeBar.made) == bars
    for bar in FakeBar.made:
        assert (bar.title, bar.total, bar.stopped) == ("Decoding bugs", 18, True)
        assert bar.completed == [4, 8, 12, 16, 18]


# Bad input


def break_(what: str, root: Path) -> None:
    """Make one thing wrong with the small parquet data set, or with the image folder."""
    data, images = root / "data", root / "images"
    first, test = data / "train-00000-of-00002.parquet", data / "test-00000-of-00001.parquet"
    good = [encoded(image) for image in pictures(3, 5, 4)]
    names = ["ant", "bee", "cow"]
    match what:
        case "broken image":
            write_parquet(first, [*good[:2], good[2][:40]], [0, 1, 2], names=names)
        case "no image":
            write_parquet(first, [good[0], None, good[2]], [0, 1, 2], names=names)
        case "other size":
            write_parquet(test, [*good, encoded(pictures(1, 6, 4)[0])], [0, 1, 2, 0], names=names)
        case "other channels":
            write_parquet(test, [encoded(pictures(1, 5, 4, 3)[0])], [0], names=names)
        case "four channels":
            write_parquet(first, [encoded(pictures(1, 5, 4, 4)[0])], [0], names=names)
        case "sixteen bits":
            deep = np.full((5, 4), 4000, dtype=np.uint16)
            write_parquet(first, [encoded(deep)], [0], names=names)
        case "label too high":
            write_parquet(test, good, [0, 3, 2], names=names)
        case "label negative":
            for file in data.iterdir():
                write_parquet(file, good, [0, 1, -1 if file == first else 2])
        case "no label":
            write_parquet(first, good, [0, None, 2], names=names)
        case "image column":
            write_parquet(first, good, [0, 1, 2], columns=("picture", "label"))
        case "label column":
            write_parquet(test, good, [0, 1, 2], columns=("image", "class"))
        case "image column type":
            pq.write_table(pa.table({"image": good, "label": [0, 1, 2]}), first)
        case "label column type":
            rows = [{"bytes": image} for image in good]
            pq.write_table(pa.table({"image": rows, "label": ["a", "b", "c"]}), first)
        case "empty split":
            write_parquet(test, [], [], names=names)
        case "other names":
            write_parquet(test, good, [0, 1, 2], names=["ant", "cow", "bee"])
        case "not parquet":
            test.write_bytes(b"hello")
        case "no test split":
            test.unlink()
        case "no train split":
            for file in data.glob("train-*"):
                file.unlink()
        case "missing file":
            first.unlink()
        case "several data sets":
            data.rename(root / "one")
            hub_folder(root, where="two")
        case "broken file":
            (images / "test" / "bee" / "02.png").write_bytes(b"\x89PNG and nothing more")
        case "empty class":
            (images / "train" / "cow").mkdir()
        case "unknown class":
            (images / "test" / "bee").rename(images / "test" / "wasp")
        case "no test folder":
            (images / "test").rename(root / "elsewhere")
        case "empty test folder":
            for file in (images / "test").rglob("*.png"):
                file.unlink()
        case "too few":
            image_folder(root / "few", count=4)
        case "empty folder":
            (root / "empty").mkdir()


@pytest.mark.parametrize(
    ("what", "folder", "message"),
    [
        ("broken image", "", "train-00000-of-00002.parquet, row 2: the image is broken"),
        ("no image", "", "train-00000-of-00002.parquet, row 1: there is no image"),
        (
            "other size",
            "",
            r"test-.*, row 3: the image is 4×6 grey, but the first one \(.*train-00000.*, row 0\) "
            "is 4×5 grey",
        ),
        ("other channels", "", "test-.*, row 0: the image is 4×5 RGB, but .* is 4×5 grey"),
        ("four channels", "", "row 0: the image is of the kind RGBA, expected grey .* or RGB"),
        ("sixteen bits", "", "row 0: the image is of the kind I;16, expected grey"),
        ("label too high", "", "test-.*, row 1: label 3 is outside the 3 classes, 0 to 2"),
        ("label negative", "", "train-00000-.*, row 2: label -1 is outside the 3 classes"),
        ("no label", "", "train-00000-.*, row 1: there is no label"),
        ("image column", "", "train-.* has no column 'image' or 'img', only picture, label"),
        ("label column", "", "test-.* has no column 'label' or 'fine_label', only image, class"),
        ("image column type", "", "'image' is binary, expected a struct with the field 'bytes'"),
        ("label column type", "", "column 'label' is string, expected whole numbers"),
        ("empty split", "", "test-.*parquet holds no images: the split is empty"),
        ("other names", "", "test-.* names other classes than .*train-"),
        ("not parquet", "", "test-.* cannot be read as a parquet file: "),
        ("no test split", "", "no test or validation split: expected files named test-00000"),
        ("no train split", "", "no train split: expected files named train-00000"),
        ("missing file", "", "is not complete: of the files train-…-of-00002.parquet number 00000"),
        ("several data sets", "", "holds several data sets, one, two: give the path of one"),
        ("broken file", "images", r"images/test/bee/02.png: the image is broken"),
        ("empty class", "images", "images/train/cow holds no images, expected files of the kinds"),
        ("unknown class", "images", "images/test/wasp: .*images/train has no class of that name"),
        ("no test folder", "images", "images has a folder train but no folder test beside it"),
        ("empty test folder", "images", "images/test holds no images .*: the split is empty"),
        ("too few", "few", "few/ant has 4 images, expected at least 5"),
        ("empty folder", "empty", "empty holds no data: expected parquet files"),
        ("", "nowhere", "no data set '.*nowhere': expected digits, mnist, cifar100, mini-imagenet"),
    ],
)
def test_bad_data_is_refused_in_one_sentence(
    what: str, folder: str, message: str, tmp_path: Path
) -> None:
    hub_folder(tmp_path)
    image_folder(tmp_path / "images", "train", "test")
    break_(what, tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        load_source(str(tmp_path / folder))
    assert "\n" not in str(caught.value)
    decoded = cache_folder() / "decoded"
    assert not [entry for entry in decoded.glob("*") if not entry.name.endswith(".lock")]

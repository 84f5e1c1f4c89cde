"""Cache of decoded data sets, keyed by the content of the files they came from.

    decoded/KEY/         train_x.npy, train_y.npy, test_x.npy, test_y.npy, about.json
    sources/FOLDER.json  the key of a folder's files, while their sizes and times stay the same

A folder under `decoded` is written elsewhere and renamed when complete, so that a killed process
leaves nothing that looks finished. Its about.json holds the SHA-256 of every array and of itself:
an entry that is damaged, was edited, or has none, is made again. If the cache cannot be written,
data sets are decoded in memory.
"""

import hashlib
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import filelock
import numpy as np

from rankup.data.decode import Decoder
from rankup.data.encoded import Labels, Layout, Pixels
from rankup.errors import DataError
from rankup.utils.files import hash_regular, open_regular, read_regular
from rankup.utils.progress import Advance, progress_bar
from rankup.utils.seal import seal

# Part of every key: changing how images are decoded or stored requires a new version.
_VERSION = 3

# A file that changed this recently could change again without its timestamp showing it.
_UNSETTLED_NS = 2_000_000_000

_MOST_ABOUT = 64 << 20  # bytes of the JSON files, of which names of classes are most

# Size and times of each array file when this process found its hash right. Hashing reads a file
# whole, half a second for each GB, which its memory map would not do at once. So it is done once
# per process, which finds what went wrong on the disk as well as edits. After that a changed size
# or time tells of an edit; no program can set ctime back.
_intact: dict[Path, tuple[int, ...]] = {}

_ARRAYS = ("train_x", "train_y", "test_x", "test_y")


@dataclass(frozen=True)
class Decoded:
    classes: tuple[str, ...]
    train_x: Pixels
    train_y: Labels
    test_x: Pixels
    test_y: Labels


def cache_folder() -> Path:
    """`RANKUP_CACHE`, or `rankup` in the platform's folder for caches."""
    if folder := os.environ.get("RANKUP_CACHE"):
        return Path(os.path.expanduser(folder))
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "rankup"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "rankup"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rankup"


def load_decoded(layout: Layout, *, side: int | None = None, progress: bool = True) -> Decoded:
    """Load a data set's arrays from the cache, or decode and cache them. `side`: see `Decoder`."""
    title = f"Decoding {layout.root.name}"
    cache = cache_folder()
    state = _state(layout, side)
    folder = cache / "decoded" / _key(layout, side, state, cache)
    decoded = _load(folder)
    if decoded is not None:
        return decoded
    decoder = Decoder(layout.read(), side)
    total = sum(len(split.labels) for split in decoder.encoded.splits.values())
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder.with_name(f".{folder.name}.lock")):
            decoded = _load(folder)  # another process may have written it while this one waited
            if decoded is None:
                with progress_bar(title, total, progress) as advance:
                    _write(folder, decoder, advance)
                    if _state(layout, side) != state:
                        _remove(folder)
                        raise DataError(f"{layout.root} changed while it was being read: try again")
                decoded = _load(folder)
    except OSError as error:
        warnings.warn(
            f"the cache folder {cache} cannot be written ({error.strerror or error}): "
            f"{layout.root.name} is decoded in memory, now and every time; name another folder "
            "with RANKUP_CACHE",
            stacklevel=3,
        )
    if decoded is not None:
        return decoded
    train, test = decoder.encoded.train, decoder.encoded.test
    with progress_bar(title, total, progress) as advance:
        return Decoded(
            decoder.encoded.classes,
            decoder.array(train, advance),
            train.labels,
            decoder.array(test, advance),
            test.labels,
        )


def _load(folder: Path) -> Decoded | None:
    """Load a cached data set; None if there is none, or it is not as it was written."""
    try:
        about = json.loads(read_regular(folder / "about.json", _MOST_ABOUT))
        if about.pop("sha256") != seal(about) or about["key"] != folder.name:
            return None
        arrays = {name: _load_array(folder / f"{name}.npy", about["arrays"]) for name in _ARRAYS}
        decoded = Decoded(tuple(about["classes"]), **arrays)
        return decoded if _is_sound(decoded) else None
    except Exception:  # a damaged file can raise many kinds of errors
        return None


def _load_array(file: Path, written: dict[str, list[Any]]) -> "np.ndarray[Any, Any]":
    """Map an array file into memory, if its content is what was written."""
    with open_regular(file) as opened:
        about = os.fstat(opened.fileno())
    state = about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino
    if _intact.get(file) != state:
        size, sha256 = written[file.stem]
        if about.st_size != size or hash_regular(file) != sha256:
            raise DataError(f"{file} has changed")
        _intact[file] = state
    array: np.ndarray[Any, Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    return array


def _is_sound(decoded: Decoded) -> bool:
    """Whether images and labels fit each other and the classes, however they came to be there."""
    splits = ((decoded.train_x, decoded.train_y), (decoded.test_x, decoded.test_y))
    return decoded.train_x.shape[1:] == decoded.test_x.shape[1:] and all(
        (str(x.dtype), x.ndim, str(y.dtype)) == ("uint8", 4, "int64")
        and y.shape == x.shape[:1] != (0,)
        and 0 <= y.min() <= y.max() < len(decoded.classes)
        for x, y in splits
    )


def _write(folder: Path, decoder: Decoder, advance: Advance) -> None:
    """Write a data set completely or not at all. The caller holds the lock."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    _remove(temporary)  # left by a killed process
    temporary.mkdir()
    arrays = {}
    try:
        for name, split in decoder.encoded.splits.items():
            shape = (len(split.labels), *decoder.shape)
            # As a stream: a full disk is an error here, but kills a process with a memory map.
            with open(temporary / f"{name}_x.npy", "wb") as file:
                hashed = _Hashed(file)
                header = {"descr": "|u1", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(hashed, header)
                for group in decoder.groups(split, advance):
                    hashed.write(np.ascontiguousarray(group).data)
                arrays[f"{name}_x"] = hashed.written
                _to_disk(file)
            with open(temporary / f"{name}_y.npy", "wb") as file:
                hashed = _Hashed(file)
                np.lib.format.write_array(hashed, split.labels)
                arrays[f"{name}_y"] = hashed.written
                _to_disk(file)
        about = {"key": folder.name, "classes": decoder.encoded.classes, "arrays": arrays}
        with open(temporary / "about.json", "wb") as file:
            file.write(json.dumps({**about, "sha256": seal(about)}).encode())
            _to_disk(file)
        _remove(folder)  # if it exists, it is broken
        os.replace(temporary, folder)
    finally:
        _remove(temporary)


class _Hashed:
    """A file that is being written, with the size and hash of what was."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()

    @property
    def written(self) -> list[Any]:
        return [self._file.tell(), self._digest.hexdigest()]

    def write(self, block: bytes | memoryview) -> int:
        self._digest.update(block)
        return self._file.write(block)


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _state(layout: Layout, side: int | None) -> str:
    """A hash that shows whether any file of the data set has changed, without reading them."""
    descriptions = []
    for file in layout.files:
        stat = file.stat()
        times = stat.st_mtime_ns, stat.st_ctime_ns
        descriptions.append((_name(layout, file), stat.st_size, *times))
    return _hash([repr((_VERSION, side, descriptions)).encode()])


def _key(layout: Layout, side: int | None, state: str, cache: Path) -> str:
    """A hash of the data set's content: names and bytes of its files, and how they are decoded."""
    root = os.fsencode(layout.root.resolve())
    memory = cache / "sources" / f"{hashlib.sha256(root).hexdigest()[:32]}.json"
    try:
        remembered = json.loads(read_regular(memory, _MOST_ABOUT))
        # A key that was edited could lead to other data, or out of the cache.
        if remembered.pop("sha256") == seal(remembered) and remembered["state"] == state:
            return str(remembered["key"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    settled = time.time_ns() - _UNSETTLED_NS
    key = _hash(_content(layout, side))[:32]
    if all(file.stat().st_mtime_ns < settled for file in layout.files):
        _remember(memory, {"folder": str(layout.root), "state": state, "key": key})
    return key


def _content(layout: Layout, side: int | None) -> Iterator[bytes]:
    yield f"{_VERSION} {side}\n".encode()
    for file in layout.files:
        try:
            with open_regular(file, layout.most) as opened:
                yield os.fsencode(_name(layout, file))
                yield f" {os.fstat(opened.fileno()).st_size}\n".encode()
                while block := opened.read(1 << 20):
                    yield block
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror}") from error


def _name(layout: Layout, file: Path) -> str:
    return file.relative_to(layout.root).as_posix()


def _hash(blocks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


def _remember(memory: Path, content: dict[str, str]) -> None:
    """Remember a key. It only saves time, so failing to write it is no reason to complain."""
    temporary = memory.with_name(f".{memory.name}.{os.getpid()}.tmp")
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({**content, "sha256": seal(content)}))
        os.replace(temporary, memory)
    except OSError:
        pass

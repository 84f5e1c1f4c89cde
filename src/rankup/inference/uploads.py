"""Unpacking uploaded zips of images. Their sizes and names are not trusted."""

import re
import stat
import zipfile
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from rankup.data.folders import SUFFIXES
from rankup.errors import RankupError

_MOST_FILES = 20_000
_MOST_CLASSES = 1_000
_MOST_UNPACKED = 2 << 30  # bytes of all images
_MOST_IMAGE = 64 << 20  # bytes of one
_MOST_RATIO = 200  # unpacked over packed bytes: images hardly shrink, more than this is a bomb
_SMALL = 1 << 20  # bytes up to which the ratio is not checked
_BLOCK = 1 << 20
_LONGEST_NAME = 100


def unpack_images(archive: BinaryIO, folder: Path) -> dict[str, int]:
    """Write the images of a zip with a folder for each class as `FOLDER/CLASS/0001.png`, and return
    how many each class has.

    Nothing else is written, and no path of the zip is used: a class's folder gets its name only
    once that is known to be plain.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            return _unpacked(opened, folder)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, EOFError) as error:
        raise RankupError(f"the zip cannot be read: {error}") from error
    except (ValueError, OSError, RuntimeError) as error:  # broken in one of many ways
        if isinstance(error, RankupError):
            raise
        raise RankupError("the zip is broken") from error


def _unpacked(opened: zipfile.ZipFile, folder: Path) -> dict[str, int]:
    chosen: list[tuple[zipfile.ZipInfo, str]] = []
    entries = opened.infolist()
    if len(entries) > 2 * _MOST_FILES:
        raise RankupError(f"the zip has {len(entries):,} entries, expected at most {_MOST_FILES:,}")
    for entry in entries:
        if (name := _class_of(entry)) is not None:
            chosen.append((entry, name))
    if not chosen:
        raise RankupError("the zip has no images in folders, expected a folder for each class")
    if len(chosen) > _MOST_FILES:
        raise RankupError(f"the zip has {len(chosen):,} images, expected at most {_MOST_FILES:,}")
    counts: Counter[str] = Counter(name for _, name in chosen)
    if not 2 <= len(counts) <= _MOST_CLASSES:
        raise RankupError(
            f"the zip has {len(counts)} folders of images, expected 2 to {_MOST_CLASSES}, one for "
            "each class"
        )
    # In the order of a folder's images, so that the same are held out as of a folder.
    chosen.sort(key=lambda each: (each[1], PurePosixPath(each[0].filename).name))
    left = _MOST_UNPACKED
    numbers: Counter[str] = Counter()
    for entry, name in chosen:
        numbers[name] += 1
        suffix = PurePosixPath(entry.filename).suffix.lower()
        path = folder / name / f"{numbers[name]:05}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        left -= _write(opened, entry, path, left)
    return dict(counts)


def _class_of(entry: zipfile.ZipInfo) -> str | None:
    """The class of an image, which is the name of its folder; None for entries that are skipped."""
    given = entry.filename
    parts = PurePosixPath(given).parts
    if given.startswith("/") or "\\" in given or ":" in given or ".." in parts:
        raise RankupError(f"the zip has an entry that leads out of it: {given[:80]!r}")
    if stat.S_ISLNK(entry.external_attr >> 16):
        raise RankupError(f"the zip has a link, {given[:80]!r}, expected plain files")
    is_hidden = any(part.startswith(".") or part == "__MACOSX" for part in parts)
    if entry.is_dir() or is_hidden or PurePosixPath(given).suffix.lower() not in SUFFIXES:
        return None
    if entry.flag_bits & 1:
        raise RankupError("the zip is encrypted")
    if len(parts) < 2:
        raise RankupError(
            f"{given[:80]!r} lies in no folder of the zip, expected a folder for each class"
        )
    name = parts[-2]
    if len(name) > _LONGEST_NAME or not name.isprintable() or not re.search(r"\w", name):
        raise RankupError(f"{name[:80]!r} is no name for a class")
    return name


def _write(opened: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path, left: int) -> int:
    """Unpack one entry and return its size, which is counted, since the stated one may be wrong.

    Args:
        left: the most bytes that it may have, as all entries together are limited.
    """
    most, written = min(_MOST_IMAGE, left), 0
    with opened.open(entry) as packed, open(path, "xb") as file:
        while block := packed.read(_BLOCK):
            written += len(block)
            shrunk = written / max(1, entry.compress_size)
            if written > most or (written > _SMALL and shrunk > _MOST_RATIO):
                raise RankupError(
                    f"{entry.filename[:80]!r} unpacks to too much: images of at most "
                    f"{_MOST_IMAGE >> 20} MiB, {_MOST_UNPACKED >> 20} MiB in all, are taken"
                )
            file.write(block)
    return written

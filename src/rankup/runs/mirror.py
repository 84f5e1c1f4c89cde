"""Copies of folders for work on another machine that has no access to them: their files are sent
there, and changed files are sent back."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, runtime_checkable

from rankup.storage.atomic import is_unfinished, write_file

if TYPE_CHECKING:
    from rankup.distributed.ranks import Ranks

Files = dict[str, bytes]  # by their paths in a folder

_OFTEN = 0.5  # seconds between checks for changes, at least
_SHARE = 50  # sending takes at most this part of the time


@runtime_checkable
class Portable(Protocol):
    """Work that can be done in copies of its folders."""

    @property
    def folders(self) -> Sequence[Path]:
        """The folders that the work reads and writes."""

    def moved(self, to: Mapping[Path, Path]) -> Self:
        """The same work in these folders instead."""


class Changed(NamedTuple):
    """Changed files of a folder's copy."""

    folder: Path
    files: Files


def pack(folder: Path, known: dict[str, tuple[int, int]] | None = None) -> Files:
    """Read the files of a folder.

    A run is written so that its network has all tasks that its metrics list, and perhaps one more.
    Files at the top, such as the metrics, are therefore read before deeper ones.

    Args:
        known: the times and sizes of files that were read before. Only other files are read, and
            added to it.
    """
    paths = [path for path in folder.rglob("*") if _is_content(path)] if folder.is_dir() else []
    files = Files()
    for path in sorted(paths, key=lambda path: (len(path.parts), path)):
        name = str(path.relative_to(folder))
        try:
            about = path.stat()
            stamp = about.st_mtime_ns, about.st_size
            if known is None or known.get(name) != stamp:
                files[name] = path.read_bytes()
        except FileNotFoundError:  # a checkpoint of a task that has just ended
            continue
        if known is not None:
            known[name] = stamp
    return files


def unpack(folder: Path, files: Files, *, whole: bool = False) -> None:
    """Write files to a folder, the deeper ones first.

    Args:
        whole: whether to remove all other files.
    """
    for name in sorted(files, key=lambda name: -name.count("/")):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not (path.is_file() and path.read_bytes() == files[name]):
            write_file(path, files[name])
    if whole and folder.is_dir():
        for path in folder.rglob("*"):
            if _is_content(path) and str(path.relative_to(folder)) not in files:
                path.unlink()


@contextmanager
def folder_of_rank(folder: Path, ranks: Ranks) -> Iterator[Path]:
    """For the first rank the folder itself, for others a copy, which is removed afterwards. Other
    ranks need no access to the folder, and what they write is dropped."""
    files = ranks.of_first(pack(folder) if ranks.rank == 0 else {})
    if ranks.rank == 0:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="rankup-") as scratch:
        copy = Path(scratch) / folder.name
        if files:
            unpack(copy, files)
        yield copy


def _is_content(path: Path) -> bool:
    return path.is_file() and path.name != ".lock" and not is_unfinished(path)


@contextmanager
def mirrored(
    content: Mapping[Path, Files], send: Callable[[Changed], None]
) -> Iterator[dict[Path, Path]]:
    """Inside, there are copies of folders with this content. Changes to them are sent from time to
    time, so that little is lost if this machine fails.

    Yields:
        The copy of each folder.
    """
    scratch = Path(tempfile.mkdtemp(prefix="rankup-"))
    copies = {folder: scratch / str(number) for number, folder in enumerate(content)}
    known = {folder: dict[str, tuple[int, int]]() for folder in content}
    for folder, files in content.items():
        unpack(copies[folder], files)
        pack(copies[folder], known[folder])
    ended = threading.Event()

    def watch() -> None:
        pause = _OFTEN
        while not ended.wait(pause):
            begun = time.perf_counter()
            for folder, copy in copies.items():
                if files := pack(copy, known[folder]):
                    send(Changed(folder, files))
            pause = max(_OFTEN, _SHARE * (time.perf_counter() - begun))

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield copies
    finally:
        ended.set()
        watching.join()
        shutil.rmtree(scratch, ignore_errors=True)

"""Reading of files that may be anything: a pipe, a device, or far larger than they should be."""

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

MOST = 1 << 30  # bytes of a file that nothing else bounds


@contextmanager
def open_regular(path: Path | str, most: int | None = None) -> Iterator[BufferedReader]:
    """Open a regular file, if `most` is given of at most that many bytes, for reading.

    Raises `OSError` for anything else without waiting for it: opening a named pipe would hang, and
    a device never ends.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        if os.path.islink(path):  # what it led to is lost, which is not the same as no file
            raise OSError(errno.EINVAL, "it is a link that leads nowhere", str(path)) from None
        raise
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            kind = "a folder" if stat.S_ISDIR(about.st_mode) else "a pipe or a device"
            raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
        if most is not None and about.st_size > most:
            raise OSError(
                errno.EFBIG, f"it has {about.st_size:,} bytes, more than {most:,}", str(path)
            )
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def read_regular(path: Path | str, most: int = MOST) -> bytes:
    """The content of a regular file of at most `most` bytes; `OSError` for anything else."""
    with open_regular(path, most) as file:
        # What it has now: it may be growing, and a read of `most` would take that much memory.
        return file.read(min(most, os.fstat(file.fileno()).st_size))


def hash_regular(path: Path | str) -> str:
    """The SHA-256 of a regular file of any size, read in blocks."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Reading of files that may be anything: a pipe, a device, or far larger than they should be."""

import errno
import os
import stat
from pathlib import Path

MOST = 1 << 30  # bytes of a file that nothing else bounds


def read_regular(path: Path | str, most: int = MOST) -> bytes:
    """The content of a regular file of at most `most` bytes.

    Raises `OSError` for anything else without waiting for it: opening a named pipe would hang, and
    a device never ends.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            kind = "a folder" if stat.S_ISDIR(about.st_mode) else "a pipe or a device"
            raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
        if about.st_size > most:
            raise OSError(
                errno.EFBIG, f"it has {about.st_size:,} bytes, more than {most:,}", str(path)
            )
        content = file.read(most + 1)  # it may have grown since
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content

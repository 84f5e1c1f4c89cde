"""Writing files atomically, so that a crash leaves none half written."""

import json
import os
import tempfile
from pathlib import Path

from rankup.errors import StoreError

UNFINISHED = ".tmp"

_ROOM = 1 << 20  # bytes that must be free


def write_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; it is on the disk when this returns."""
    temporary = temporary_of(path)
    try:
        # Removed, not written to: it may be a pipe, which would hang, or a link to elsewhere.
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def temporary_of(path: Path) -> Path:
    """Where a file is written before it is moved into place."""
    return path.with_name(f".{path.name}{UNFINISHED}")


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents; they are on the disk when this returns."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def refuse_unwritable(folder: Path) -> None:
    """Raise `StoreError` if nothing can be saved to a folder, before minutes of work whose result
    would be lost. Nothing is left there."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(_ROOM))
    except OSError as error:
        raise StoreError(f"nothing can be saved to {folder}: {error.strerror}") from error


def sync(folder: Path) -> None:
    """Wait until a folder's entries are on the disk."""
    if os.name != "posix":  # elsewhere a folder cannot be opened, and its entry needs no sync
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, data: object) -> None:
    write_file(path, json_bytes(data))


def json_bytes(data: object) -> bytes:
    """Human-readable JSON."""
    return utf8(json.dumps(data, indent=1, ensure_ascii=False)) + b"\n"


def utf8(json_text: str) -> bytes:
    """JSON as bytes. File names may have bytes that are not text, which Python keeps as
    surrogates: these are written as JSON escapes, so that they can be read back.

    >>> utf8('"caf\\udce9 é"').decode()
    '"caf\\\\udce9 é"'
    """
    return json_text.encode(errors="backslashreplace")


def is_unfinished(path: Path) -> bool:
    """Whether a file is a temporary one that a killed process left; the next one removes it."""
    return path.name.startswith(".") and path.suffix == UNFINISHED

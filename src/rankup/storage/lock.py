"""A lock on a network's folder, so that one process at a time writes to it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from rankup.errors import StoreError
from rankup.storage import notes
from rankup.storage.atomic import UNFINISHED, is_unfinished, make_folder, temporary_of
from rankup.storage.manifest import BASE, MANIFEST, SUMS_FILE

_LOCK = ".lock"
_PATIENCE = 10.0  # seconds to wait for another process to finish its save


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder, which is made if it does not exist, and remove the temporary files of
    processes that were killed. Folders with other files are refused."""
    make_folder(folder)
    # Listed once: between two listings another process may commit its first save.
    names = {entry.name for entry in folder.iterdir() if not is_unfinished(entry)}
    names -= {name for name in names if re.fullmatch(SUMS_FILE, name)}
    if MANIFEST not in names and names - {BASE, _LOCK, "tasks", notes.NOTES}:
        raise StoreError(f"{folder} holds other files: save to a new or an empty folder")
    try:
        with filelock.FileLock(folder / _LOCK, timeout=_PATIENCE):
            of_tasks = (folder / "tasks").glob(f".*-*.safetensors{UNFINISHED}")
            left_over = [*of_tasks, *folder.glob(f".sums-*.safetensors{UNFINISHED}")]
            others = (folder / name for name in (MANIFEST, BASE, notes.NOTES))
            for temporary in (*map(temporary_of, others), *left_over):
                temporary.unlink(missing_ok=True)
            yield
    except filelock.Timeout:
        raise StoreError(f"another process is saving to {folder}: try again later") from None

"""Taking up tasks that another process has saved since a network was loaded."""

from pathlib import Path

from rankup.errors import StoreError
from rankup.net.network import IncrementalNet
from rankup.storage.manifest import MANIFEST, Manifest
from rankup.storage.store import StrPath, _moved, _read_task

Signature = tuple[int, int, int]


def signature(path: StrPath) -> Signature | None:
    """What changes whenever a network is saved to a folder; None if there is none. Cheap enough to
    be asked for many times a second."""
    try:
        about = (Path(path) / MANIFEST).stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_size, about.st_ino


def refresh(net: IncrementalNet, path: StrPath) -> list[str]:
    """Add the tasks that a folder has more than a network that was loaded from it, and return their
    names. Only their files are read; other threads may go on asking the network.

    Raises `StoreError` if the folder has changed in any other way: then it is to be loaded again.
    """
    folder = Path(path)
    manifest = Manifest.read(folder)
    known = len(net.tasks)
    files = [file for _, file in manifest.tasks]
    is_same = manifest.options == net.options and manifest.specs == net.plan.specs
    if not is_same or [net.saved_files.get(file.file) for file in files[:known]] != files[:known]:
        raise StoreError(f"{folder} holds another network than the one that was loaded from it")
    if len(files) < known:
        raise StoreError(f"{folder} has lost tasks: it has {len(files)}, the network has {known}")
    if new := [task for task, _ in manifest.tasks[known:]]:
        read = [_read_task(folder, manifest, index) for index in range(known, len(files))]
        by_part = [[_moved(own, net.device) for own in parts] for parts in zip(*read, strict=True)]
        net._append(new, by_part)
        net.saved_files.update({file.file: file for file in files[known:]})
    return [task.name for task in new]

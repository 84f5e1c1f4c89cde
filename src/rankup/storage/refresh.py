"""Taking up tasks that another process has saved since a network was loaded."""

from pathlib import Path

from rankup.errors import StoreError
from rankup.net.network import IncrementalNet
from rankup.storage.manifest import MANIFEST, Manifest
from rankup.storage.reading import append_tasks
from rankup.storage.store import StrPath

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
    files = {task.name: file for task, file in manifest.tasks}
    if manifest.options != net.options or manifest.specs != net.plan.specs:
        raise StoreError(f"{folder} holds another network than the one that was loaded from it")
    if changed := [name for name in net.tasks if files.get(name) != net.saved_files.get(name)]:
        raise StoreError(f"{folder} has lost or exchanged tasks, such as {changed[0]!r}")
    known = manifest.task_list()
    new = [index for index, name in enumerate(known.names) if name not in net.tasks]
    append_tasks(net, folder, manifest, known, new)
    return [known.names[index] for index in new]

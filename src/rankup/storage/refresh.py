"""Adding tasks to a loaded network that another process has saved to its folder."""

from dataclasses import replace
from pathlib import Path

from rankup.errors import StoreError
from rankup.net.network import IncrementalNet
from rankup.storage import notes
from rankup.storage.manifest import MANIFEST, Manifest
from rankup.storage.reading import append_tasks
from rankup.storage.store import StrPath

Signature = tuple[object, ...]


def signature(path: StrPath) -> Signature | None:
    """A value that changes whenever a network is saved to a folder; None if there is none. It is
    cheap enough to be compared many times a second."""
    manifest, about = (_stat(Path(path) / name) for name in (MANIFEST, notes.NOTES))
    return None if manifest is None else (manifest, about)


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_size, about.st_ino


def refresh(net: IncrementalNet, path: StrPath) -> list[str]:
    """Add the tasks that were saved to a folder since a network was loaded from it, and update all
    notes and descriptions. Only the files of new tasks are read, and other threads may go on using
    the network.

    Returns the names of the new tasks. Raises `StoreError` if the folder has changed in any other
    way, such that it has to be loaded again.
    """
    folder = Path(path)
    manifest = Manifest.read(folder)
    tasks, known = manifest.task_list(), len(net.tasks)
    files = {task.name: file for task, file in manifest.tasks}
    is_same = manifest.options == net.options and manifest.specs == net.plan.specs
    if len(files) < known:
        raise StoreError(f"{folder} has lost tasks: it has {len(files)}, the network has {known}")
    if not is_same or [*files.items()][:known] != [(n, net.saved_files.get(n)) for n in net.tasks]:
        raise StoreError(f"{folder} holds another network than the one that was loaded from it")
    append_tasks(net, folder, manifest, tasks, range(known, len(files)))
    # Descriptions of known tasks may have changed.
    for index, task in enumerate(tasks.tasks[:known]):
        if task.about != net._tasks.tasks[index].about:
            net._tasks.tasks[index] = replace(net._tasks.tasks[index], about=task.about)
    net.inputs = manifest.inputs or net.inputs
    net.notes = {name: note for name, note in notes.read(folder).items() if name in net.tasks}
    return net.tasks[known:]

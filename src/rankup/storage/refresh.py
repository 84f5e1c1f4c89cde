"""Taking up tasks that another process has saved since a network was loaded."""

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
    """What changes whenever a network is saved to a folder; None if there is none. Cheap enough to
    be asked for many times a second."""
    files = (_stat(Path(path) / name) for name in (MANIFEST, notes.NOTES))
    manifest, said = files
    return None if manifest is None else (manifest, said)


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_size, about.st_ino


def refresh(net: IncrementalNet, path: StrPath) -> list[str]:
    """Add the tasks that a folder has more than a network that was loaded from it, and return their
    names. Only their files are read, and what is said of tasks; other threads may go on asking.

    Raises `StoreError` if the folder has changed in any other way: then it is to be loaded again.
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
    # What was said of tasks since then.
    for index, task in enumerate(tasks.tasks[:known]):
        if task.about != net._tasks.tasks[index].about:
            net._tasks.tasks[index] = replace(net._tasks.tasks[index], about=task.about)
    net.inputs = manifest.inputs or net.inputs
    net.notes = {name: note for name, note in notes.read(folder).items() if name in net.tasks}
    return net.tasks[known:]

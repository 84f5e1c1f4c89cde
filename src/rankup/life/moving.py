"""Editing networks on disk: adding the tasks of another one, and renaming tasks."""

from pathlib import Path

from rankup.runs.predict import inputs_of_run
from rankup.runs.records import CONFIG
from rankup.storage.editing import Edit, joining
from rankup.storage.manifest import Manifest
from rankup.storage.store import load, save


def joined(first: Path, second: Path) -> Edit:
    """Plan to add the second network's tasks to the first. If there is no first network, it becomes
    a copy of the second."""
    of_run = (second.parent / CONFIG).exists() and Manifest.read(second).inputs is None
    return joining(first, second, inputs_of_run(second.parent) if of_run else None)


def renamed(folder: Path, name: str, **said: object) -> None:
    """Annotate a task of a network on disk, for example with a title.

    Args:
        said: as for `IncrementalNet.annotate`.
    """
    net = load(folder, tasks=[name])
    net.annotate(name, **said)
    save(net, folder)


def refuse_unknown(folder: Path, name: str) -> None:
    """Raise an error if a network has no task of this name. Only its manifest is read."""
    Manifest.read(folder).task_list().committed(name)

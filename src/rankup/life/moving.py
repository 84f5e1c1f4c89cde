"""Tasks that leave a network on disk, or come to it from another."""

from pathlib import Path

from rankup.runs.predict import inputs_of_run
from rankup.runs.records import CONFIG
from rankup.storage.editing import Edit, joining
from rankup.storage.manifest import Manifest
from rankup.storage.store import load, save


def joined(first: Path, second: Path) -> Edit:
    """The first network with the second's tasks, yet to be carried out. Where there is no first one
    it becomes what the second is."""
    of_run = (second.parent / CONFIG).exists() and Manifest.read(second).inputs is None
    return joining(first, second, inputs_of_run(second.parent) if of_run else None)


def renamed(folder: Path, name: str, **said: object) -> None:
    """Say for people what a task is called, or more of it."""
    net = load(folder, tasks=[name])
    net.annotate(name, **said)
    save(net, folder)


def refuse_unknown(folder: Path, name: str) -> None:
    """Refuse the name of a task that a network does not know; nothing but its manifest is read."""
    Manifest.read(folder).task_list().committed(name)

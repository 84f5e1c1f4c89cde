"""Tasks that leave a network on disk, or come to it from another."""

from pathlib import Path

from rankup.net.network import IncrementalNet
from rankup.runs.predict import inputs_of_run
from rankup.runs.records import CONFIG
from rankup.storage.manifest import is_of_network
from rankup.storage.store import load, save


def joined(first: Path, second: Path) -> tuple[IncrementalNet, list[str]]:
    """The first network with the second's tasks, yet to be saved, and which are new to it. Where
    there is no first one it becomes what the second is."""
    other = load(second)
    if other.inputs is None and (second.parent / CONFIG).exists():
        other.inputs = inputs_of_run(second.parent)
    if not is_of_network(first):
        return _as_new(other), other.tasks
    net = load(first)
    new = [name for name in other.tasks if name not in net.tasks]
    net.join(other)
    net.inputs = net.inputs or other.inputs
    for name in new:
        # What a task left to its own network, it now has to say itself.
        if (inputs := other.describe(name).inputs) != net.inputs:
            net.annotate(name, inputs=inputs)
    return net, new


def _as_new(net: IncrementalNet) -> IncrementalNet:
    net.saved_files.clear()  # they lie elsewhere
    return net


def removed(folder: Path, names: list[str]) -> IncrementalNet:
    """The network without tasks, yet to be saved. Of several, later ones may have selected from
    earlier ones."""
    net = load(folder)
    for name in sorted(names, key=lambda name: -net._tasks.committed(name)):
        net.remove_task(name)
    return net


def renamed(folder: Path, name: str, **said: object) -> None:
    """Say for people what a task is called, or more of it."""
    net = load(folder, tasks=[name])
    net.annotate(name, **said)
    save(net, folder)

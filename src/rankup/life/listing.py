"""Listing the tasks of networks on disk, and how two networks differ. Only manifests and notes are
read, no tensors."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankup import models
from rankup.net.about import Note, TaskDescription
from rankup.net.kept_factors import kept_of_layers
from rankup.net.size import stored_by_task
from rankup.storage import notes
from rankup.storage.manifest import Manifest


def described(folder: Path) -> list[TaskDescription]:
    """Descriptions of all tasks of a network, as by `net.describe`."""
    manifest, noted = Manifest.read(folder), notes.read(folder)
    known = manifest.task_list()
    counts = stored_by_task(manifest.specs, known)
    return [
        TaskDescription(
            name=task.name,
            classes=task.classes,
            views=task.views,
            uses=known.uses(index),
            kept=kept_of_layers(manifest.specs, known, index),
            numbers=counts[index],
            **vars(task.about) | {"inputs": task.about.inputs or manifest.inputs},
            **vars(noted.get(task.name, Note())),
        )
        for index, task in enumerate(known.tasks)
    ]


@dataclass(frozen=True)
class Differences:
    """How two networks differ.

    Attributes:
        grown: settings in which they were grown differently, with both values.
        only_first: the names of tasks that only the first network has.
        only_second: likewise of the second.
        same: tasks with the same bits and descriptions.
        different: other tasks of which both have one of this name, and what differs.
    """

    grown: dict[str, tuple[str, str]]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    same: tuple[str, ...]
    different: dict[str, tuple[str, ...]]

    def __bool__(self) -> bool:
        return bool(self.grown or self.only_first or self.only_second or self.different)


def differences(first: Path, second: Path) -> Differences:
    """Compare two networks on disk."""
    one, two = Manifest.read(first), Manifest.read(second)
    mine, theirs = _entries(first, one), _entries(second, two)
    both = [name for name in mine if name in theirs]
    different = {
        name: tuple(key for key in mine[name] if mine[name][key] != theirs[name][key])
        for name in both
        if mine[name] != theirs[name]
    }
    return Differences(
        dict(_grown_differently(one, two)),
        tuple(name for name in mine if name not in theirs),
        tuple(name for name in theirs if name not in mine),
        tuple(name for name in both if name not in different),
        different,
    )


def _entries(folder: Path, manifest: Manifest) -> dict[str, dict[str, Any]]:
    files = {task.name: file.sha256 for task, file in manifest.tasks}
    return {
        task.name: {"numbers": files[task.name], **_description(task)} for task in described(folder)
    }


def _description(task: TaskDescription) -> dict[str, Any]:
    """What is compared of a description. The same task may be saved twice."""
    left_out = ("name", "numbers", "saved", "versions")
    return {key: value for key, value in task.to_json().items() if key not in left_out}


def _grown_differently(one: Manifest, two: Manifest) -> Iterator[tuple[str, tuple[str, str]]]:
    if not models.are_alike(one.model, two.model):
        yield "model", (model_of(one), model_of(two))
    mine, theirs = vars(one.options), vars(two.options)
    for key in mine:
        if mine[key] != theirs[key]:
            yield key, (str(mine[key]), str(theirs[key]))
    for key in ("dtype", "inputs"):
        if getattr(one, key) != getattr(two, key):
            yield key, (str(getattr(one, key)), str(getattr(two, key)))
    if one.base != two.base:
        yield "kept weights", tuple(m.base.sha256[:8] if m.base else "none" for m in (one, two))  # type: ignore[misc]


def model_of(manifest: Manifest) -> str:
    """The module that a network was grown from, with its options, in words."""
    model = manifest.model
    options = ", ".join(f"{key}={value}" for key, value in model.get("options", {}).items())
    return f"{model['model'] or model['class']} ({options})"

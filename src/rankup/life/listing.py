"""What networks on disk have learned and how two differ, told by their manifests and notes: no
tensor is read."""

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
    """All tasks of a network, as `net.describe` tells them."""
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
    """How two networks differ."""

    grown: dict[str, tuple[str, str]]  # what they were made of, where that differs: first, second
    only_first: tuple[str, ...]  # tasks
    only_second: tuple[str, ...]
    same: tuple[str, ...]  # to the bit, and they say the same of themselves
    different: dict[str, tuple[str, ...]]  # tasks that have a name in common, and what differs

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
    return {task.name: {"numbers": files[task.name], **_said(task)} for task in described(folder)}


def _said(task: TaskDescription) -> dict[str, Any]:
    apart = ("name", "numbers", "saved", "versions")  # the same task may be saved twice
    return {key: value for key, value in task.to_json().items() if key not in apart}


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
    """What a network was grown from, with its options."""
    model = manifest.model
    options = ", ".join(f"{key}={value}" for key, value in model.get("options", {}).items())
    return f"{model['model'] or model['class']} ({options})"

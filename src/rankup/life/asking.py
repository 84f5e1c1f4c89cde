"""Asking a network on disk: which class inputs are of, and how many of a folder's it gets right."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rankup.data import folders, image_tables
from rankup.data.decode import progress_bar
from rankup.data.inputs import ImageInput, Input, TextInput
from rankup.errors import DataError, RankupError
from rankup.life.samples import Found, find, read, scaling_of
from rankup.net.network import IncrementalNet
from rankup.net.tasks import KnownTask, listed
from rankup.runs.predict import Prediction
from rankup.storage.manifest import Manifest
from rankup.storage.store import load
from rankup.training.batches import as_floats
from rankup.training.memory_format import for_answers

_TOGETHER = 256  # samples


@dataclass(frozen=True)
class Asked:
    """A task of a network on disk that is asked."""

    folder: Path
    name: str
    class_names: tuple[str, ...]
    inputs: Input


def asked_task(folder: Path, name: str | None) -> Asked:
    """The task of that name or number, from 1 on, or the only one; nothing but the manifest is
    read."""
    manifest = Manifest.read(folder)
    return _asked(folder, manifest, _chosen(folder, manifest, name))


def all_asked(folder: Path) -> list[Asked]:
    """All tasks of a network."""
    manifest = Manifest.read(folder)
    if not manifest.tasks:
        raise _knows_nothing(folder)
    return [_asked(folder, manifest, task) for task, _ in manifest.tasks]


def _asked(folder: Path, manifest: Manifest, task: KnownTask) -> Asked:
    inputs = task.about.inputs or manifest.inputs
    if inputs is None:
        raise RankupError(f"{folder} does not say what inputs task {task.name!r} takes")
    names = task.about.class_names or tuple(map(str, range(task.classes)))
    return Asked(folder, task.name, names, inputs)


def _chosen(folder: Path, manifest: Manifest, name: str | None) -> KnownTask:
    tasks = {task.name: task for task, _ in manifest.tasks}
    by_number = {str(number): task for number, task in enumerate(tasks.values(), start=1)}
    if not tasks:
        raise _knows_nothing(folder)
    if name is None and len(tasks) == 1:
        return next(iter(tasks.values()))
    if name is None:
        raise RankupError(
            f"{folder} knows {len(tasks)} tasks; name one with --task: {listed(list(tasks))}"
        )
    if name not in tasks | by_number:
        raise RankupError(f"{folder} knows no task {name!r}, only {listed(list(tasks))}")
    return (by_number | tasks)[name]  # names take precedence


def _knows_nothing(folder: Path) -> RankupError:
    return RankupError(f"{folder} knows no task yet: teach it one with `rankup learn`")


def expanded(items: Sequence[str], inputs: Input) -> list[str]:
    """What was named: texts as they are, files of images, and all images in folders."""
    if not isinstance(inputs, ImageInput):
        return list(items)
    return [file for item in items for file in _files(Path(item))]


def _files(path: Path) -> Iterator[str]:
    if not path.is_dir():
        yield str(path)
        return
    inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in folders.SUFFIXES)
    if not inside:
        raise DataError(f"{path} holds no images")
    yield from map(str, inside)


def predict(asked: Asked, items: Sequence[str]) -> list[list[Prediction]]:
    """The classes of a task for each image or text, the likeliest first."""
    if not isinstance(asked.inputs, ImageInput | TextInput):
        raise RankupError(
            f"task {asked.name!r} takes {asked.inputs}, and only images and texts can be asked here"
        )
    net = load(asked.folder, tasks=[asked.name])
    predictions = []
    with progress_bar("asking", len(items), show=True) as advance:
        for start in range(0, len(items), _TOGETHER):
            part = items[start : start + _TOGETHER]
            for row in answers(net, asked.name, asked.inputs.batch(part)).softmax(1):
                order = row.argsort(descending=True).tolist()
                names = asked.class_names
                predictions.append([Prediction(names[index], float(row[index])) for index in order])
            advance(len(part))
    return predictions


@torch.no_grad()
def answers(net: IncrementalNet, task: str, x: Tensor) -> Tensor:
    x = x.to(net.dtype) if x.is_floating_point() else x
    logits: Tensor = net(for_answers(net.body, x), task=task)
    return logits


@dataclass(frozen=True)
class Tested:
    """How many samples of each class a task gets right, and what is wrong with those left out."""

    asked: Asked
    right: dict[str, int]
    counts: dict[str, int]
    broken: tuple[str, ...]

    @property
    def accuracy(self) -> float:
        return sum(self.right.values()) / sum(self.counts.values())


def test(asked: Asked, root: Path, held_out: bool) -> Tested:
    """Test a task with a folder per class, whose names are the task's; or with a table of texts.

    Args:
        held_out: only with what `learn` would hold out; else with all that is there, of folders
            train and test with the latter.
    """
    found = _to_test(asked, root, held_out)
    for name in found.classes:
        if name not in asked.class_names:
            known = listed(asked.class_names)
            raise DataError(f"{root} has a class {name!r}, but task {asked.name!r} knows {known}")
    net, scaling = load(asked.folder, tasks=[asked.name]), scaling_of(asked.inputs)
    with progress_bar(found.what, len(found.test), show=True) as advance:
        (inputs, labels), broken = read(found.test, asked.inputs, advance)
    if not len(labels):
        raise DataError(f"{root} holds nothing that can be read: {broken[0]}")
    number = torch.tensor([asked.class_names.index(name) for name in found.classes])
    said = []
    for part in torch.split(inputs, _TOGETHER):
        x = as_floats(part, net.dtype)
        said.append(answers(net, asked.name, x if scaling is None else scaling(x)).argmax(1))
    is_right = torch.cat(said) == number[labels]
    return Tested(
        asked,
        _by_class(found.classes, labels[is_right]),
        _by_class(found.classes, labels),
        broken,
    )


def _to_test(asked: Asked, root: Path, held_out: bool) -> Found:
    is_folder = isinstance(asked.inputs, ImageInput) and root.is_dir()
    if held_out or not is_folder or image_tables.find(root) is not None:
        found = find(root, asked.inputs)
        return found if held_out else replace(found, test=[*found.train, *found.test])
    classes, pictures = folders.to_test(root)
    return Found(root, "images", classes, (), pictures)


def _by_class(classes: Sequence[str], labels: Tensor) -> dict[str, int]:
    counts = torch.bincount(labels, minlength=len(classes)).tolist()
    return dict(zip(classes, counts, strict=True))

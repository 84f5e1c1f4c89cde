"""Asking a network on disk: which class inputs are of, and how many of a folder's it gets right."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rankup.data import folders, image_tables
from rankup.data.inputs import ImageInput, Input, TextInput
from rankup.data.texts import cut, texts_of_csv
from rankup.errors import DataError, RankupError
from rankup.life.samples import Found, find, read, scaling_of
from rankup.net.guess import guess_and_answer
from rankup.net.network import IncrementalNet
from rankup.net.tasks import KnownTask, listed
from rankup.runs.predict import Prediction
from rankup.storage.manifest import Manifest
from rankup.storage.store import StrPath, load
from rankup.training.batches import as_floats
from rankup.training.memory_format import for_answers
from rankup.utils.progress import progress_bar

_TOGETHER = 256  # samples


@dataclass(frozen=True)
class Asked:
    """A task of a network on disk that is asked."""

    folder: StrPath
    name: str
    class_names: tuple[str, ...]
    inputs: Input


def asked_task(folder: StrPath, name: str | None) -> Asked:
    """The task of that name or number, from 1 on, or the only one; nothing but the manifest is
    read."""
    manifest = Manifest.read(Path(folder))
    return _asked(folder, manifest, _chosen(folder, manifest, name))


def all_asked(folder: StrPath) -> list[Asked]:
    """All tasks of a network."""
    manifest = Manifest.read(Path(folder))
    if not manifest.tasks:
        raise _knows_nothing(folder)
    return [_asked(folder, manifest, task) for task, _ in manifest.tasks]


def _asked(folder: StrPath, manifest: Manifest, task: KnownTask) -> Asked:
    inputs = task.about.inputs or manifest.inputs
    if inputs is None:
        raise RankupError(f"{folder} does not say what inputs task {task.name!r} takes")
    names = task.about.class_names or tuple(map(str, range(task.classes)))
    return Asked(folder, task.name, names, inputs)


def _chosen(folder: StrPath, manifest: Manifest, name: str | None) -> KnownTask:
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


def _knows_nothing(folder: StrPath) -> RankupError:
    return RankupError(f"{folder} knows no task yet: teach it one with `rankup learn`")


def expanded(items: Sequence[str], inputs: Input) -> list[str]:
    """What was named: texts as they are, files of images, all images in folders, and what CSV
    files hold of either."""
    if isinstance(inputs, ImageInput):
        return [file for item in items for file in _files(Path(item))]
    if isinstance(inputs, TextInput):
        return [text for item in items for text in _texts(item)]
    return list(items)


def _texts(item: str) -> list[str]:
    if len(item) >= 256 or not Path(item).suffix or not Path(item).is_file():
        return [item]
    if _is_csv(Path(item)):
        return texts_of_csv(Path(item))
    raise DataError(
        f"{item} is a file, but the network is asked about texts: give it the file's lines, with - "
        f"in place of the name and < {item}"
    )


def _is_csv(path: Path) -> bool:
    return path.suffix.lower() == ".csv"


def _readable(
    items: Sequence[str], inputs: ImageInput | TextInput, broken: list[str]
) -> Iterator[tuple[list[str], Tensor]]:
    """Batches of what can be read, with its names; what is wrong with the others is added to
    `broken`. If nothing can be read, that is an error."""
    total = len(items)
    with progress_bar("asking", total, show=True) as advance:
        for start in range(0, total, _TOGETHER):
            part = list(items[start : start + _TOGETHER])
            try:
                yield part, inputs.batch(part)
            except DataError:
                each = [(item, _one(item, inputs, broken)) for item in part]
                whole = [(item, x) for item, x in each if x is not None]
                if whole:
                    yield [item for item, _ in whole], torch.cat([x for _, x in whole])
            advance(len(part))
    if len(broken) == total:
        raise DataError(broken[0])


def _one(item: str, inputs: ImageInput | TextInput, broken: list[str]) -> Tensor | None:
    try:
        return inputs.batch([item])
    except DataError as error:
        broken.append(str(error))
        return None


@dataclass(frozen=True)
class Untold:
    """A network on disk that is asked without being told the task."""

    folder: StrPath
    class_names: tuple[tuple[str, ...], ...]  # of each task
    inputs: Input


@dataclass(frozen=True)
class Guessed:
    """Whose input it may be, and of which of its classes."""

    task: str
    probability: float  # of the task, given that it is one of those known
    none: float  # how much it looks like none: the share of the task's own that fit it better
    classes: list[Prediction]


def untold(folder: StrPath) -> Untold | None:
    """The network, if it has several tasks and can guess them; else None. Nothing but the manifest
    is read."""
    manifest = Manifest.read(Path(folder))
    if manifest.options.router is None or len(manifest.tasks) < 2:
        return None
    tasks = [task for task, _ in manifest.tasks]
    ways = [task.about.inputs or manifest.inputs for task in tasks]
    if ways[0] is None or any(way != ways[0] for way in ways):
        raise RankupError(
            f"the tasks of {folder} do not all prepare their inputs alike, so that none can be "
            f"guessed; name one with --task: {listed([task.name for task in tasks])}"
        )
    names = (task.about.class_names or tuple(map(str, range(task.classes))) for task in tasks)
    return Untold(folder, tuple(names), ways[0])


def guess(asked: Untold, items: Sequence[str], broken: list[str]) -> Iterator[tuple[str, Guessed]]:
    """For each image or text the likeliest task and its classes, the likeliest first. What cannot
    be read is left out, and what is wrong with it added to `broken`."""
    if not isinstance(asked.inputs, ImageInput | TextInput):
        raise RankupError(
            f"{asked.folder} takes {asked.inputs}, and only images and texts can be asked here"
        )
    net = load(asked.folder)
    for part, x in _readable(items, asked.inputs, broken):
        yield from zip(part, _guessed(net, asked, x), strict=True)


@torch.no_grad()
def _guessed(net: IncrementalNet, asked: Untold, x: Tensor) -> list[Guessed]:
    x = for_answers(net.body, x.to(net.dtype) if x.is_floating_point() else x)
    (guesses, untold), found = guess_and_answer(net, x), list[Guessed]()
    by_task = torch.split(untold.logits, [len(names) for names in asked.class_names], 1)
    for row, task in enumerate(guesses.task.tolist()):
        names, shares = asked.class_names[task], by_task[task][row].softmax(0)
        order = shares.argsort(descending=True).tolist()
        classes = [Prediction(names[index], float(shares[index])) for index in order]
        sure, none = float(guesses.probabilities[row, task]), float(guesses.none[row])
        found.append(Guessed(net.tasks[task], sure, none, classes))
    return found


def _files(path: Path) -> Iterator[str]:
    if not path.is_dir():
        yield from image_tables.files_of_csv(path) if _is_csv(path) else [str(path)]
        return
    inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in folders.SUFFIXES)
    if not inside:
        raise DataError(f"{path} holds no images")
    yield from map(str, inside)


def predict(
    asked: Asked, items: Sequence[str], broken: list[str]
) -> Iterator[tuple[str, list[Prediction]]]:
    """The classes of a task for each image or text, the likeliest first. What cannot be read is
    left out, and what is wrong with it added to `broken`."""
    if not isinstance(asked.inputs, ImageInput | TextInput):
        raise RankupError(
            f"task {asked.name!r} takes {asked.inputs}, and only images and texts can be asked here"
        )
    net = load(asked.folder, tasks=[asked.name])
    names = asked.class_names
    for part, x in _readable(items, asked.inputs, broken):
        for item, row in zip(part, answers(net, asked.name, x).softmax(1), strict=True):
            order = row.argsort(descending=True).tolist()
            yield item, [Prediction(names[index], float(row[index])) for index in order]


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
    if isinstance(asked.inputs, TextInput):
        (inputs,) = cut([inputs], asked.inputs)
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

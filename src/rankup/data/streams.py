"""Streams: sequences of tasks made from a source and a seed.

Permuted and rotated streams have a task per permutation or angle, all on the same images; split
streams divide a source's classes among their tasks, as the source says or at random.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, overload

from rankup.errors import DataError

if TYPE_CHECKING:
    import torch

    from rankup.data.inputs import Input
    from rankup.data.sources import Source
    from rankup.data.tasks import Task


@dataclass(frozen=True)
class StreamInfo:
    """How a stream is made, before any data is read."""

    description: str
    source: str
    kind: str  # permuted, rotated or split
    tasks: int | None  # the default number of tasks; None: it must be given
    side: int | None = None  # pixels each way to scale its images to; None: not scaled


STREAMS = {
    "p-digits": StreamInfo(
        "scikit-learn's 8×8 digits, pixels permuted by task", "digits", "permuted", 10
    ),
    "r-digits": StreamInfo(
        "scikit-learn's 8×8 digits, rotated by an angle per task", "digits", "rotated", 10
    ),
    "s-digits": StreamInfo("scikit-learn's 8×8 digits, 2 classes per task", "digits", "split", 5),
    "p-mnist": StreamInfo("MNIST, pixels permuted by task", "mnist", "permuted", 20),
    "r-mnist": StreamInfo("MNIST, rotated by an angle per task", "mnist", "rotated", 20),
    "s-mnist": StreamInfo("MNIST, 2 classes per task", "mnist", "split", 5),
    "s-cifar100": StreamInfo("CIFAR-100, 5 classes per task", "cifar100", "split", 20),
    "s-miniimagenet": StreamInfo("miniImageNet, 5 classes per task", "mini-imagenet", "split", 20),
}

# `split:PATH` is a stream of the user's own data set, `split:PATH@64` scales its images to 64×64.
OWN = "split:"
_SIZED = re.compile(r"(.+)@(\d+)")
_LARGEST_SIDE = 4096  # pixels each way

OWN_DESCRIPTION = (
    "your own images or texts, the classes divided among --tasks tasks, or by a column domain; "
    "with PATH@64 images are scaled to 64×64 pixels"
)


@dataclass(frozen=True, eq=False)
class Stream:
    """An ordered sequence of tasks.

    >>> make_stream("p-digits")
    Stream('p-digits', 10 tasks)
    """

    name: str
    tasks: "tuple[Task, ...]"

    def __repr__(self) -> str:
        # Without the tasks, which would take a line each.
        return f"Stream({self.name!r}, {len(self)} task{'' if len(self) == 1 else 's'})"

    def __len__(self) -> int:
        return len(self.tasks)

    def __iter__(self) -> "Iterator[Task]":
        return iter(self.tasks)

    @overload
    def __getitem__(self, index: int) -> "Task": ...
    @overload
    def __getitem__(self, index: slice) -> "tuple[Task, ...]": ...
    def __getitem__(self, index: int | slice) -> "Task | tuple[Task, ...]":
        return self.tasks[index]

    def first(self, count: int) -> "Stream":
        """A stream of the first `count` tasks.

        >>> make_stream("s-digits").first(2)
        Stream('s-digits', 2 tasks)
        """
        if not 1 <= count <= len(self):
            raise DataError(
                f"the first {count} tasks were asked for, but {self.name} has {len(self)}"
            )
        return Stream(self.name, self.tasks[:count])

    def to(self, device: "torch.device | str") -> "Stream":
        """The stream on a device; tensors that its tasks share stay shared."""
        there: dict[torch.Tensor, torch.Tensor] = {}
        return Stream(self.name, tuple(task.moved(device, there) for task in self.tasks))


def make_stream(
    name: str,
    *,
    tasks: int | None = None,
    seed: int = 0,
    data: Path | str | None = None,
    download: bool = False,
    progress: bool = True,
    inputs: "Input | None" = None,
    per_class: int | None = None,
) -> Stream:
    """Make a stream by its name, as `STREAMS` lists them, or `split:PATH` for a folder of your own,
    `split:PATH@64` where its images are to be scaled to 64×64 pixels.

    Args:
        tasks: the number of tasks. Split streams divide all classes evenly among them or, where a
            data set names its tasks, take this many of those. By default as in `STREAMS`, or all
            named tasks.
        seed: of permutations, angles, the division of classes, and the order of named tasks.
        data: the folder that holds the data sets; by default the environment's RANKUP_DATA.
        download: fetch a missing data set.
        progress: show progress while reading.
        inputs: the network's inputs. Texts need a `TextInput`, for their tokenizer. An
            `ImageInput` gives split streams of images the mean and deviation to normalise by.
        per_class: the most training samples of a class, drawn by the seed.

    >>> stream = make_stream("p-digits", tasks=3)
    >>> [task.name for task in stream]
    ['permutation 01', 'permutation 02', 'permutation 03']
    """
    if not isinstance(name, str):
        raise DataError(f"a stream is given by its name, got {type(name).__name__}")
    info = stream_info(name)
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise DataError(f"seed must be a whole number, got {seed!r}")
    seed, count = int(seed), info.tasks if tasks is None else tasks
    for what, given in (("tasks", count), ("per_class", per_class)):
        if given is not None and (
            isinstance(given, bool) or not isinstance(given, Integral) or given < 1
        ):
            raise DataError(f"{what} must be a whole number of at least 1, got {given!r}")

    from rankup.data.inputs import ImageInput, TextInput
    from rankup.data.sources import load_source
    from rankup.data.transforms import Scaling

    texts = inputs if isinstance(inputs, TextInput) else None
    if count is None and texts is None:  # before images are read, which may take long
        raise DataError(f"{name} needs a number of tasks (--tasks) to divide its classes among")
    source = load_source(
        info.source, data=data, download=download, progress=progress, side=info.side, texts=texts
    )
    # A folder's location must not change what is drawn, so all paths share a name.
    drawn_as = name if name in STREAMS else "split"
    if per_class is not None:
        source = _with_at_most(source, drawn_as, int(per_class), seed)
    if source.tasks:
        return Stream(name, tuple(_named_tasks(source, drawn_as, count, seed)))
    if count is None:
        raise DataError(f"{name} needs a number of tasks (--tasks) to divide its classes among")
    make = {"permuted": _permuted, "rotated": _rotated, "split": _split}[info.kind]
    made = make(source, drawn_as, int(count), seed)  # count may be NumPy's
    if isinstance(inputs, ImageInput) and info.kind == "split" and not inputs.is_plain:
        scaling = Scaling(inputs.mean, inputs.std)
        made = [replace(task, transform=scaling) for task in made]
    return Stream(name, tuple(made))


def stream_info(name: str) -> StreamInfo:
    """Look up a stream by its name, or parse `split:PATH`, without reading any data."""
    if name in STREAMS:
        return STREAMS[name]
    path = name.removeprefix(OWN)
    if path != name and path:
        sized = None if Path(os.path.expanduser(path)).is_dir() else _SIZED.fullmatch(path)
        path, side = (sized[1], int(sized[2])) if sized else (path, None)
        if side is not None and not 1 <= side <= _LARGEST_SIDE:
            raise DataError(
                f"images can be scaled to 1 to {_LARGEST_SIDE} pixels, got {side} in {name}"
            )
        return StreamInfo(OWN_DESCRIPTION, path, "split", None, side)
    close = get_close_matches(name, STREAMS, n=1)
    raise DataError(
        f"there is no stream {name!r}{f' (did you mean {close[0]}?)' if close else ''}: expected "
        f"one of {', '.join(STREAMS)}, or {OWN}PATH for a data set of your own"
    )


def _permuted(source: "Source", stream: str, count: int, seed: int) -> "list[Task]":
    """Every task permutes the pixels in its own way, except the first, which keeps their order."""
    import torch

    from rankup.data.transforms import Permutation
    from rankup.seeds import generator

    def permutation(number: int) -> Permutation:
        pixels = source.train.x[0].size
        if number == 1:  # as a permutation too, so that all tasks cost the same
            return Permutation(torch.arange(pixels))
        rng = generator(seed, "stream", stream, "permutation", number)
        return Permutation(torch.randperm(pixels, generator=rng, device="cpu"))

    whole = _all_classes(source)
    return [
        replace(whole, name=f"permutation {number:02}", transform=permutation(number))
        for number in range(1, count + 1)
    ]


def _rotated(source: "Source", stream: str, count: int, seed: int) -> "list[Task]":
    """Every task turns the images by an angle of its own, anywhere from 0 to 180 degrees."""
    import torch

    from rankup.data.transforms import Rotation
    from rankup.seeds import generator

    whole = _all_classes(source)
    tasks = []
    for number in range(1, count + 1):
        rng = generator(seed, "stream", stream, "angle", number)
        angle = 180 * float(torch.rand((), generator=rng, dtype=torch.float64, device="cpu"))
        name = f"rotation {number:02}: {angle:.1f}°"
        tasks.append(replace(whole, name=name, transform=Rotation(angle)))
    return tasks


def _split(source: "Source", stream: str, count: int, seed: int) -> "list[Task]":
    """Every task has its own share of the classes, drawn without replacement."""
    import torch

    from rankup.seeds import generator

    total = len(source.class_names)
    if total < 2:
        raise DataError(f"{source.name} has {total} class, expected at least 2 to tell apart")
    possible = [number for number in range(1, total // 2 + 1) if total % number == 0]
    if count not in possible:
        raise DataError(
            f"the {total} classes of {source.name} cannot be divided evenly among {count} tasks of "
            f"at least 2 classes each; possible: {', '.join(map(str, possible)) or 'none'}"
        )
    rng = generator(seed, "stream", stream, "classes")
    order = torch.randperm(total, generator=rng, device="cpu").reshape(count, -1)
    return [
        _of_classes(source, f"split {number:02}", classes)
        for number, classes in enumerate(order.tolist(), 1)
    ]


def _named_tasks(source: "Source", stream: str, count: int | None, seed: int) -> "list[Task]":
    """The tasks that the data set names, in random order."""
    import torch

    from rankup.seeds import generator

    names = sorted(source.tasks)
    if count is not None and count > len(names):
        raise DataError(
            f"{count} tasks were asked for, but {source.name} has {len(names)}: {', '.join(names)}"
        )
    rng = generator(seed, "stream", stream, "tasks")
    order = torch.randperm(len(names), generator=rng, device="cpu").tolist()[:count]
    return [_of_classes(source, names[index], source.tasks[names[index]]) for index in order]


def _with_at_most(source: "Source", stream: str, most: int, seed: int) -> "Source":
    """The source with at most `most` random training samples of each class, in their order."""
    import numpy as np
    import torch

    from rankup.data.sources import Split
    from rankup.seeds import generator

    kept = []
    for number in range(len(source.class_names)):
        rows = np.flatnonzero(source.train.y == number)
        rng = generator(seed, "stream", stream, "per class", number)
        drawn = torch.randperm(len(rows), generator=rng, device="cpu")[:most].numpy()
        kept.append(rows[drawn])
    chosen = np.sort(np.concatenate(kept))
    return replace(source, train=Split(source.train.x[chosen], source.train.y[chosen]))


def _all_classes(source: "Source") -> "Task":
    """A source as one task of all classes. Copies made by `replace` share its tensors."""
    return _of_classes(source, source.name, list(range(len(source.class_names))))


def _of_classes(source: "Source", name: str, classes: list[int]) -> "Task":
    """A task of some of a source's classes, which become 0, 1, … in the order given."""
    import numpy as np
    import torch

    from rankup.data.tasks import Task

    renumbered = np.full(len(source.class_names), -1, dtype=np.int64)
    renumbered[classes] = np.arange(len(classes))
    train_y, test_y = renumbered[source.train.y], renumbered[source.test.y]  # -1: another class
    for split, labels in (("training", train_y), ("test", test_y)):
        missing = set(range(len(classes))) - set(np.unique(labels).tolist())
        if missing:
            absent = source.class_names[classes[min(missing)]]
            raise DataError(f"{source.name} has no {split} {source.items} of its class {absent!r}")
    train, test = np.flatnonzero(train_y >= 0), np.flatnonzero(test_y >= 0)
    # Indexing copies, as it must: a source's arrays may be memory maps.
    return Task(
        name,
        len(classes),
        torch.from_numpy(np.asarray(source.train.x[train])),
        torch.from_numpy(train_y[train]),
        torch.from_numpy(np.asarray(source.test.x[test])),
        torch.from_numpy(test_y[test]),
        class_names=tuple(source.class_names[index] for index in classes),
    )

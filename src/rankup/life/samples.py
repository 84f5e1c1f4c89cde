"""Finding and reading the samples that a network is taught: folders of images, one for each class,
tables that name images, or tables of texts."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rankup.data import folders, image_tables, texts
from rankup.data.inputs import ImageInput, Input, TextInput
from rankup.data.tasks import Task
from rankup.data.transforms import Scaling
from rankup.errors import DataError

Advance = Callable[[int], None]
Sample = Path | str | bytes  # a file, a text or an encoded image

_CHUNK = 64  # images that threads read at a time


@dataclass(frozen=True)
class Found:
    """The samples in a folder, not yet decoded.

    Attributes:
        root: the folder or file.
        what: "images" or "texts".
        classes: the names of the classes.
        train: the training samples, each with the index of its class.
        test: the test samples, likewise.
        odd: files beside the images that are no images.
    """

    root: Path
    what: str
    classes: tuple[str, ...]
    train: Sequence[tuple[Sample, int]]
    test: Sequence[tuple[Sample, int]]
    odd: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """How many samples each class has."""
        count = Counter(label for _, label in (*self.train, *self.test))
        return {name: count[label] for label, name in enumerate(self.classes)}

    def __len__(self) -> int:
        return len(self.train) + len(self.test)


def find(root: Path, inputs: Input | None) -> Found:
    """Find the samples in a folder or file for a network that takes these inputs."""
    if not root.exists():
        raise DataError(f"there is no folder {root}")
    if isinstance(inputs, TextInput):
        return _find_texts(root)
    if not isinstance(inputs, ImageInput):
        takes = "is not known" if inputs is None else f"is {inputs}"
        raise DataError(f"what the network takes {takes}, and only images and texts can be taught")
    if image_tables.is_of_texts(root):
        raise DataError(
            f"{root} holds texts, but the network takes {inputs}: make one for texts with `rankup "
            "new NETWORK --net hf:NAME --pretrained`"
        )
    if (table := image_tables.find(root)) is not None:
        _refuse_one_class(root, table.classes)
        return Found(root, "images", table.classes, table.train, table.test)
    if not root.is_dir():
        raise DataError(
            f"{root} is a file, expected a folder with a folder of images per class, or a CSV or "
            "parquet file with columns image and label"
        )
    found = folders.find(root)
    if found is None:
        such = f"expected one for each class, such as {root / 'boots'} and {root / 'sandals'}"
        raise DataError(f"{root} holds no folders of images, {folders.where_else(root) or such}")
    _refuse_one_class(root, found.classes)
    odd = _odd_files(root, {*found.files})
    return Found(root, "images", found.classes, found.train, found.test, odd)


def _refuse_one_class(root: Path, classes: Sequence[str]) -> None:
    if len(classes) < 2:
        raise DataError(f"{root} has one class, {classes[0]!r}, expected at least 2")


def _odd_files(root: Path, known: set[Path]) -> tuple[str, ...]:
    files = (f for f in root.rglob("*") if f not in known and not f.is_dir())
    names = (str(f.relative_to(root)) for f in files)
    return tuple(sorted(name for name in names if not name.rpartition("/")[2].startswith(".")))


def _find_texts(root: Path) -> Found:
    files = texts.find(root)
    if files is None:
        raise DataError(
            f"{root} holds no texts, expected a CSV or parquet file with columns text and label"
        )
    train, test = files.read()
    classes = tuple(sorted(set(train.classes)))
    _refuse_one_class(root, classes)
    number = {name: index for index, name in enumerate(classes)}
    if unknown := set(test.classes) - set(classes):
        raise DataError(f"{root}: class {min(unknown)!r} has texts to test with, but none to learn")
    learned, tested = (
        [(text, number[name]) for text, name in zip(rows.texts, rows.classes, strict=True)]
        for rows in (train, test)
    )
    return Found(root, "texts", classes, learned, tested)


def read_task(
    name: str, found: Found, inputs: Input, advance: Advance
) -> tuple[Task, tuple[str, ...]]:
    """Read the samples as a task. Images that cannot be read are left out; a sentence for each of
    them is returned, too.

    Args:
        advance: called with the number of samples that were read.
    """
    (train_x, train_y), broken = read(found.train, inputs, advance)
    (test_x, test_y), more = read(found.test, inputs, advance)
    if isinstance(inputs, TextInput):
        train_x, test_x = texts.cut([train_x, test_x], inputs)
    for split, labels in (("to learn from", train_y), ("to test with", test_y)):
        left = torch.bincount(labels, minlength=len(found.classes))
        if not left.all():
            empty = found.classes[int(left.argmin())]
            raise DataError(
                f"class {empty!r} has no {found.what} {split} that can be read: "
                f"{(*broken, *more)[0]}"
            )
    task = Task(
        name,
        len(found.classes),
        train_x,
        train_y,
        test_x,
        test_y,
        transform=scaling_of(inputs),
        class_names=found.classes,
    )
    return task, (*broken, *more)


def read(
    samples: Sequence[tuple[Sample, int]], inputs: Input, advance: Advance
) -> tuple[tuple[Tensor, Tensor], tuple[str, ...]]:
    """Inputs and labels `[N]`, with images as bytes, not yet scaled; and a sentence for each image
    that cannot be read."""
    labels = [label for _, label in samples]
    if isinstance(inputs, TextInput):
        x = inputs.batch([str(text) for text, _ in samples])
        advance(len(samples))
        return (x, torch.tensor(labels)), ()
    assert isinstance(inputs, ImageInput)
    shape = (len(samples), inputs.channels, inputs.size, inputs.size)
    pixels, kept, broken = np.empty(shape, np.uint8), list[int](), list[str]()

    def one(number: int) -> str | None:
        try:
            pixels[number] = inputs.pixels(samples[number][0], number)
        except DataError as error:
            return str(error)
        return None

    with ThreadPoolExecutor() as pool:
        for start in range(0, len(samples), _CHUNK):
            numbers = range(start, min(start + _CHUNK, len(samples)))
            for number, error in zip(numbers, pool.map(one, numbers), strict=True):
                kept.append(number) if error is None else broken.append(error)
            advance(len(numbers))
    return (torch.from_numpy(pixels[kept]), torch.tensor(labels)[kept]), tuple(broken)


def scaling_of(inputs: Input) -> Scaling | None:
    """The transform for images as bytes, which scales them; None if that is not needed."""
    if isinstance(inputs, ImageInput) and not inputs.is_plain:
        return Scaling(inputs.mean, inputs.std)
    return None

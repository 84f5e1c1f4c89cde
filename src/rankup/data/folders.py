"""Image folders, one per class: `train/CLASS/*.png` and `test/CLASS/*.png`, or `CLASS/*.png`
without splits."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from rankup.data.encoded import MOST_ENCODED, Encoded, Labels, read_image
from rankup.data.sources import TEST_EVERY, every_fifth
from rankup.errors import DataError

SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)
TEST_FOLDERS = ("test", "validation", "valid", "val")


@dataclass(frozen=True)
class ImageFolder:
    """The images of a data set and their labels, a `Layout`."""

    root: Path
    classes: tuple[str, ...]
    train: tuple[tuple[Path, int], ...]
    test: tuple[tuple[Path, int], ...]

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(file for file, _ in self.train + self.test)

    @property
    def most(self) -> int:
        return MOST_ENCODED

    def read(self) -> Encoded:
        return Encoded(self.classes, FolderSplit(self.train), FolderSplit(self.test))


def find(root: Path) -> ImageFolder | None:
    """Find the images in a folder, ordered by name; None if there are none."""
    train = root / "train"
    # A class may be called "train" too: a split holds folders, a class holds images.
    if train.is_dir() and _classes(train):
        test = next((root / name for name in TEST_FOLDERS if (root / name).is_dir()), None)
        if test is None:
            names = " or ".join(TEST_FOLDERS)
            raise DataError(f"{root} has a folder train but no folder {names} beside it")
        classes, tested = _classes(train), _classes(test)
        if not tested:
            raise DataError(f"{test} holds no class folders with images: the split is empty")
        unknown = [name for name in tested if name not in classes]
        if unknown:
            raise DataError(f"{test / unknown[0]}: {train} has no class of that name")
        untested = [name for name in classes if name not in tested]
        if untested:
            raise DataError(f"{test} has no images of class {untested[0]!r}, which {train} has")
        return ImageFolder(root, classes, _labelled(train, classes), _labelled(test, classes))
    classes = _classes(root)
    if not classes:
        return None
    pictures = _labelled(root, classes)
    labels = np.array([label for _, label in pictures], dtype=np.int64)
    for name, count in zip(classes, np.bincount(labels), strict=True):
        if count < TEST_EVERY:
            raise DataError(
                f"{root / name} has {count} image{'s' if count > 1 else ''}, expected at least "
                f"{TEST_EVERY}: without folders train and test, every fifth image of a class is "
                "for testing"
            )
    pairs = list(zip(pictures, every_fifth(labels), strict=True))
    return ImageFolder(
        root,
        classes,
        tuple(picture for picture, tested in pairs if not tested),
        tuple(picture for picture, tested in pairs if tested),
    )


def where_else(root: Path) -> str:
    """A hint which folder to name instead of one that holds no folders of images: the one above, if
    it holds images itself, or one inside it; or which files are no images. Empty if none helps."""
    if _images(root):
        above = os.path.normpath(root / "..")
        return f"but images themselves: name the folder that it lies in, {above!r}"
    inner = sorted(f for f in root.iterdir() if f.is_dir() and not f.name.startswith("."))
    holds = next((f for f in inner if any(_images(g) for g in f.iterdir() if g.is_dir())), None)
    if holds is not None:
        return f"but {holds} does: name that one"
    files = (f for inside in inner for f in sorted(inside.iterdir()) if f.is_file())
    other = next((f for f in files if not f.name.startswith(".")), None)
    return f"expected files of type {_kinds()}, got {other}" if other else ""


def to_test(root: Path) -> tuple[tuple[str, ...], tuple[tuple[Path, int], ...]]:
    """The classes of a folder, and its images with their labels: of a test split, or else all."""
    splits = (root / name for name in TEST_FOLDERS if (root / name).is_dir())
    folder = next((split for split in splits if _classes(split)), root)
    if not (classes := _classes(folder)):
        raise DataError(
            f"{root} holds no folders of images, "
            f"{where_else(root) or 'expected one for each class'}"
        )
    return classes, _labelled(folder, classes)


@dataclass(frozen=True)
class FolderSplit:
    """Image files and their labels, an `EncodedSplit`."""

    pictures: tuple[tuple[Path, int], ...]

    @cached_property
    def labels(self) -> Labels:
        return np.array([label for _, label in self.pictures], dtype=np.int64)

    def images(self) -> Iterator[bytes]:
        for file, _ in self.pictures:
            yield read_image(file)

    def where(self, index: int) -> str:
        return str(self.pictures[index][0])


def _classes(folder: Path) -> tuple[str, ...]:
    """The names of the folders of images in a folder; empty if no folder in it holds any."""
    inner = [f for f in folder.iterdir() if f.is_dir() and not f.name.startswith(".")]
    empty = [f for f in inner if not _images(f)]
    if len(empty) == len(inner):
        return ()
    if empty:
        raise DataError(f"{empty[0]} holds no images, expected files of type {_kinds()}")
    return tuple(sorted(f.name for f in inner))


def _kinds() -> str:
    return ", ".join(sorted(suffix[1:] for suffix in SUFFIXES))


def _labelled(folder: Path, classes: tuple[str, ...]) -> tuple[tuple[Path, int], ...]:
    for inner in (f for name in classes for f in (folder / name).iterdir() if f.is_dir()):
        if not inner.name.startswith(".") and _images(inner):
            raise DataError(
                f"{inner} is a folder of images inside a class: put them beside the class's others"
            )
    return tuple(
        (file, label) for label, name in enumerate(classes) for file in _images(folder / name)
    )


def _images(folder: Path) -> list[Path]:
    # A pipe is no image; a link that is broken or leads to none is reported when it is read.
    files = (f for f in folder.iterdir() if f.is_symlink() or f.is_file())
    images = (f for f in files if f.suffix.lower() in SUFFIXES)
    # By name: paths themselves sort differently on other systems. Hidden files are not images.
    return sorted((f for f in images if not f.name.startswith(".")), key=lambda f: f.name)

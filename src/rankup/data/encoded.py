"""Interfaces of a data set before it is decoded: images as bytes, labels as numbers.

A layout finds the files of a data set; reading it gives its classes and two encoded splits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rankup.errors import DataError
from rankup.utils.files import read_regular

Labels = npt.NDArray[np.int64]
Pixels = npt.NDArray[np.uint8]

MOST_ENCODED = 256 << 20  # bytes of an image's file; photos have a tenth of that


class EncodedSplit(Protocol):
    """The images of one split in their order."""

    @property
    def labels(self) -> Labels: ...

    def images(self) -> Iterator[bytes | None]:
        """Every image as stored in its file; None where there is none."""

    def where(self, index: int) -> str:
        """An image's file for errors, with the row from 0 if the file holds several images."""


@dataclass(frozen=True)
class Encoded:
    """A data set's class names and its encoded splits."""

    classes: tuple[str, ...]
    train: EncodedSplit
    test: EncodedSplit

    def __post_init__(self) -> None:
        for split in (self.train, self.test):
            _check_labels(split, self.classes)

    @property
    def splits(self) -> dict[str, EncodedSplit]:
        return {"train": self.train, "test": self.test}


class Layout(Protocol):
    """Where the files of a data set lie. Finding them is cheap, reading is not."""

    @property
    def root(self) -> Path: ...

    @property
    def files(self) -> Sequence[Path]:
        """Every file that the decoded arrays depend on."""

    @property
    def most(self) -> int | None:
        """The most bytes that one of its files may have, if there is a limit."""

    def read(self) -> Encoded: ...


def read_image(file: Path) -> bytes:
    """An image as stored in its file."""
    try:
        return read_regular(file, MOST_ENCODED)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from error


def _check_labels(split: EncodedSplit, classes: Sequence[str]) -> None:
    outside = np.flatnonzero((split.labels < 0) | (split.labels >= len(classes)))
    if outside.size:
        first = int(outside[0])
        raise DataError(
            f"{split.where(first)}: label {split.labels[first]} is outside the {len(classes)} "
            f"classes, 0 to {len(classes) - 1}"
        )

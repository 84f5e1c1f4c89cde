"""Images that a table names: CSV or parquet files with a column of paths, relative to the file, or
of encoded images, and a column of classes."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rankup.data import parquet
from rankup.data.folders import TEST_FOLDERS
from rankup.data.sources import TEST_EVERY, every_fifth
from rankup.data.texts import CLASS_COLUMNS, TEXT_COLUMNS, columns_of_csv, named_column
from rankup.errors import DataError

IMAGE_COLUMNS = ("image", "img", "path", "file", "file_name", "filename")
SUFFIXES = (".csv", ".parquet")

Image = Path | bytes


@dataclass(frozen=True)
class ImageTable:
    """Images with the numbers of their classes."""

    classes: tuple[str, ...]
    train: tuple[tuple[Image, int], ...]
    test: tuple[tuple[Image, int], ...]


def find(root: Path) -> ImageTable | None:
    """The images of a table, or of train and test tables in a folder; None if there are none.
    Without a test table, every fifth image of a class is for testing."""
    if (tables := _tables(root)) is None:
        return None
    train, test = tables
    learned = _rows(train)
    classes = tuple(sorted({name for _, name in learned}))
    tested = _rows(test) if test else []
    if unknown := {name for _, name in tested} - {*classes}:
        raise DataError(f"{test}: {train} has no class {min(unknown)!r}")
    number = {name: index for index, name in enumerate(classes)}
    labelled = tuple((image, number[name]) for image, name in learned)
    if test:
        return ImageTable(classes, labelled, tuple((image, number[name]) for image, name in tested))
    counts = Counter(name for _, name in learned)
    if (few := min(counts, key=counts.__getitem__)) and counts[few] < TEST_EVERY:
        raise DataError(
            f"{train} has {counts[few]} image{'s' if counts[few] > 1 else ''} of class {few!r}, "
            f"expected at least {TEST_EVERY}: without a table test, every fifth image of a class "
            "is for testing"
        )
    is_test = every_fifth(np.array([label for _, label in labelled], dtype=np.int64))
    pairs = list(zip(labelled, is_test, strict=True))
    return ImageTable(
        classes,
        tuple(image for image, held_out in pairs if not held_out),
        tuple(image for image, held_out in pairs if held_out),
    )


def files_of_csv(table: Path) -> list[str]:
    """The files of images that a CSV file names, whatever their classes are."""
    columns = columns_of_csv(table)
    named = columns[named_column(table, columns, IMAGE_COLUMNS, "images")]
    return [str(table.parent / file) for file in named if file]


def is_of_texts(root: Path) -> bool:
    """Whether a file is a table of texts, not of images."""
    if not root.is_file() or root.suffix.lower() not in SUFFIXES:
        return False
    names = _columns(root)
    return not names & {*IMAGE_COLUMNS} and bool(names & {*TEXT_COLUMNS})


def _tables(root: Path) -> tuple[Path, Path | None] | None:
    """The table to learn from and, if there is one, the table to test with."""
    if root.is_file():
        return (root, None) if root.suffix.lower() in SUFFIXES else None
    found = [file for file in sorted(root.iterdir()) if file.suffix.lower() in SUFFIXES]
    tables = [file for file in found if file.is_file() and _names_images(file)]
    if len(tables) <= 1:
        return (tables[0], None) if tables else None
    by_name = {table.stem.lower().partition("-")[0]: table for table in tables}
    test = next((by_name[name] for name in TEST_FOLDERS if name in by_name), None)
    if len(tables) > 2 or "train" not in by_name or test is None:
        raise DataError(
            f"{root} holds {len(tables)} tables of images, expected one, or two that are called "
            "train and test"
        )
    return by_name["train"], test


def _names_images(file: Path) -> bool:
    """Whether a table in a folder is of images and their classes."""
    try:
        names = _columns(file)
    except DataError:  # nobody said that it is to be read
        return False
    return bool(names & {*IMAGE_COLUMNS}) and bool(names & {*CLASS_COLUMNS})


def _columns(file: Path) -> set[str]:
    is_csv = file.suffix.lower() == ".csv"
    return {*(columns_of_csv(file) if is_csv else parquet.columns(file))}


def _rows(file: Path) -> list[tuple[Image, str]]:
    """Each row's image and the name of its class."""
    if file.suffix.lower() == ".csv":
        columns: Any = columns_of_csv(file)
    else:
        columns = parquet.table(file, also=IMAGE_COLUMNS)
    images = columns[named_column(file, columns, IMAGE_COLUMNS, "images")]
    classes = columns[named_column(file, columns, CLASS_COLUMNS, "classes")]
    pairs = enumerate(zip(images, classes, strict=True))
    return [(_image(file, row, image), _class(file, row, name)) for row, (image, name) in pairs]


def _image(file: Path, row: int, given: Any) -> Image:
    if isinstance(given, dict):  # as the Hub stores images
        given = given.get("bytes") or given.get("path")
    if isinstance(given, bytes) and given:
        return given
    if isinstance(given, str) and given.strip():
        return file.parent / given
    raise DataError(f"{file}, row {row}: there is no image")


def _class(file: Path, row: int, given: Any) -> str:
    if given is None or given == "":
        raise DataError(f"{file}, row {row}: there is no class")
    return str(given)

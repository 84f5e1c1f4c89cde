"""Texts with a class each: parquet files in the Hub's layout, or CSV files.

A row has a text, a class, and may have a task: `text`, `intent` and `domain`, or one of the other
names below. Each task then has the classes that occur in it.
"""

import csv
import io
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rankup.data import parquet
from rankup.data.inputs import TextInput
from rankup.data.sources import Source, Split, every_fifth
from rankup.errors import DataError
from rankup.utils.files import MOST, read_regular

TEXT_COLUMNS = ("text", "sentence", "utterance", "question")
CLASS_COLUMNS = ("intent", "label", "category", "class")
TASK_COLUMNS = ("domain", "task")
# Texts that belong to no task, such as those of CLINC150: by the name of their task or class.
OUT_OF_SCOPE = frozenset({"oos", "out of scope", "out-of-scope", "out_of_scope"})

_TESTS = ("test", "validation", "valid", "val")


@dataclass(frozen=True)
class Texts:
    """Rows of one split: what is said, its class, and its task, which is empty where none is
    named."""

    texts: tuple[str, ...]
    classes: tuple[str, ...]
    tasks: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def taken(self, chosen: Sequence[bool]) -> "Texts":
        kept = [number for number, keep in enumerate(chosen) if keep]
        columns = (self.texts, self.classes, self.tasks)
        return Texts(*(tuple(column[number] for number in kept) for column in columns))


@dataclass(frozen=True)
class TextFiles:
    """Where the files of texts lie; without a test split every fifth text of a class is in it."""

    root: Path
    train: tuple[Path, ...]
    test: tuple[Path, ...]

    def read(self) -> tuple[Texts, Texts]:
        """Texts to learn from, and to test with; what is out of scope is left out."""
        train = _read(self.train)
        if self.test:
            return train, _read(self.test)
        kinds = {pair: number for number, pair in enumerate(dict.fromkeys(_pairs(train)))}
        tested = every_fifth(np.array([kinds[pair] for pair in _pairs(train)], dtype=np.int64))
        if not all(count >= 5 for count in Counter(_pairs(train)).values()):
            few = min(Counter(_pairs(train)).items(), key=lambda item: item[1])
            raise DataError(
                f"{self.root} has {few[1]} text{'s' if few[1] > 1 else ''} of class "
                f"{few[0][1]!r}, expected at least 5: without a test split, every fifth text of a "
                "class is for testing"
            )
        return train.taken([not test for test in tested]), train.taken(tested)


def find(path: Path) -> TextFiles | None:
    """Find the texts of a folder, or of a CSV or parquet file; None if it has none."""
    if path.is_file():
        kind = path.suffix.lower()
        has_texts = kind == ".csv" or (kind == ".parquet" and _is_of_texts(path))
        return TextFiles(path, (path,), ()) if has_texts else None
    if (tables := sorted(path.glob("*.csv"))) and not _has_folders(path):
        by_name = {table.stem.lower(): table for table in tables}
        test = next((by_name[name] for name in _TESTS if name in by_name), None)
        if len(tables) == 1:
            return TextFiles(path, (tables[0],), ())
        if "train" not in by_name or test is None:
            raise DataError(
                f"{path} holds {len(tables)} CSV files, expected train.csv and test.csv, or just "
                "one file"
            )
        return TextFiles(path, (by_name["train"],), (test,))
    found = parquet.find(path)
    if found is None or not _is_of_texts(found.train[0]):
        return None
    return TextFiles(path, found.train, found.test)


def _is_of_texts(file: Path) -> bool:
    """Whether a parquet file has texts that are not captions of images."""
    names = {*parquet.columns(file)}
    return bool(names & {*TEXT_COLUMNS}) and not names & {*parquet.IMAGE_COLUMNS}


def _has_folders(path: Path) -> bool:
    """Whether there are folders beside the tables, which are then about what is in these."""
    return any(each.is_dir() and not each.name.startswith(".") for each in path.iterdir())


def text_source(files: TextFiles, inputs: TextInput) -> Source:
    """Texts as token ids, their classes by number; a class is one of its task's, if tasks are
    named."""
    train, test = files.read()
    pairs = sorted(set(_pairs(train)))
    number = {pair: index for index, pair in enumerate(pairs)}
    for task, name in _pairs(test):
        if (task, name) not in number:
            where = f" of task {task!r}" if task else ""
            raise DataError(
                f"{files.root}: class {name!r}{where} has texts to test with, but none to learn "
                "from"
            )
    tasks: dict[str, list[int]] = {}
    for index, (task, _) in enumerate(pairs):
        tasks.setdefault(task, []).append(index)
    ids = [inputs.batch(rows.texts) for rows in (train, test)]
    learned, tested = (
        Split(x.numpy(), np.array([number[pair] for pair in _pairs(rows)]))
        for x, rows in zip(cut(ids, inputs), (train, test), strict=True)
    )
    return Source(
        files.root.resolve().stem,
        learned,
        tested,
        tuple(name for _, name in pairs),
        tasks={} if set(tasks) == {""} else tasks,
    )


def cut(ids: Sequence[Tensor], inputs: TextInput) -> list[Tensor]:
    """Token ids without the padding that none of the texts needs: no longer than they have to be,
    which is what a network's time depends on, and a multiple of 8."""
    length = max(columns_used(x, inputs.pad) for x in ids)
    return [x[:, :length] for x in ids]


def columns_used(ids: Tensor, pad: int) -> int:
    """How many columns of token ids `[B, L]` to keep, at a multiple of 8: all that follow are
    padding in every text."""
    used = ids.ne(pad).any(0).nonzero()
    return 8 * math.ceil((int(used[-1]) + 1) / 8) if len(used) else 8


def _pairs(rows: Texts) -> list[tuple[str, str]]:
    return list(zip(rows.tasks, rows.classes, strict=True))


def _read(files: Sequence[Path]) -> Texts:
    texts: list[str] = []
    classes: list[str] = []
    tasks: list[str] = []
    for file in files:
        columns = columns_of_csv(file) if file.suffix.lower() == ".csv" else parquet.table(file)
        text = columns[named_column(file, columns, TEXT_COLUMNS, "texts")]
        label = columns[named_column(file, columns, CLASS_COLUMNS, "classes")]
        task_column = next((name for name in TASK_COLUMNS if name in columns), None)
        task = columns[task_column] if task_column else [""] * len(text)
        for row, (said, kind, of_task) in enumerate(zip(text, label, task, strict=True)):
            if not isinstance(said, str) or not said.strip():
                raise DataError(f"{file}, row {row}: there is no text")
            for what, value in (("class", kind), ("task", of_task)):
                if value is None or (value == "" and (what == "class" or task_column)):
                    raise DataError(f"{file}, row {row}: there is no {what}")
            if not {str(kind).lower(), str(of_task).lower()} & OUT_OF_SCOPE:
                texts.append(said)
                classes.append(str(kind))
                tasks.append(str(of_task))
    if not texts:
        raise DataError(f"{files[0]} holds no texts: the split is empty")
    return Texts(tuple(texts), tuple(classes), tuple(tasks))


def named_column(file: Path, columns: Any, expected: Sequence[str], what: str) -> str:
    """The first of the expected columns that a table has."""
    for name in expected:
        if name in columns:
            return name
    raise DataError(
        f"{file} has no column of {what}, {' or '.join(map(repr, expected))}, only "
        f"{', '.join(columns) or 'none'}"
    )


def texts_of_csv(file: Path) -> list[str]:
    """The texts of a CSV file, whatever their classes are."""
    columns = columns_of_csv(file)
    said = columns[named_column(file, columns, TEXT_COLUMNS, "texts")]
    return [text for text in said if text]


def columns_of_csv(file: Path) -> dict[str, list[Any]]:
    """A CSV file with a line of names on top: its columns by name, in lower case. Between them are
    commas or, as spreadsheets write them in many countries, semicolons or tabs."""
    try:
        content = read_regular(file, MOST).decode("utf-8-sig")
        between = max(",;\t", key=content.partition("\n")[0].count)
        rows = list(csv.DictReader(io.StringIO(content, newline=""), delimiter=between))
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = 1 + error.object.count(b"\n", 0, error.start)
        raise DataError(f"{file}, line {line}: this is not UTF-8; save it as CSV UTF-8") from error
    except csv.Error as error:
        raise DataError(f"{file} cannot be read as CSV: {error}") from error
    if not rows:
        raise DataError(f"{file} holds no rows under a line of names of columns")
    names = (name for name in rows[0] if name is not None)
    return {name.strip().lower(): [row.get(name) for row in rows] for name in names}

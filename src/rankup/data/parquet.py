"""Hub-layout parquet: `SPLIT-00000-of-0000N.parquet`, an image column of encoded bytes and a label
column of whole numbers, with the class names in the schema's `huggingface` metadata."""

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from rankup.data.encoded import Encoded, Labels
from rankup.errors import DataError
from rankup.utils.files import open_regular

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label")
TESTS = ("test", "validation")

_MAGIC = b"PAR1"  # the first and the last bytes of a file

# Rows that are read at once: few, so that encoded images take little memory, but not too few,
# so that there is little overhead.
_ROWS = 256


@dataclass(frozen=True)
class ParquetFolder:
    """The parquet files of a data set, a `Layout`."""

    root: Path
    train: tuple[Path, ...]
    test: tuple[Path, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        return self.train + self.test

    @property
    def most(self) -> None:
        """No limit: a shard may hold any number of images, and is read in batches of rows."""

    def read(self) -> Encoded:
        train = ParquetSplit(tuple(map(_Shard.open, self.train)))
        test = ParquetSplit(tuple(map(_Shard.open, self.test)))
        return Encoded(_class_names(train.shards + test.shards), train, test)


def find(root: Path, tests: Sequence[str] = TESTS) -> ParquetFolder | None:
    """Find the parquet files of a folder or of one folder in it; None if there are none.

    The test split is the first of `tests` that exists.
    """
    folder = _folder_with_parquet(root)
    if folder is None:
        return None
    splits = defaultdict(list)
    for file in sorted(folder.glob("*-*.parquet")):
        splits[file.name.partition("-")[0]].append(file)
    train = _first_split(folder, splits, ("train",))
    return ParquetFolder(root, train, _first_split(folder, splits, tests))


@dataclass(frozen=True)
class ParquetSplit:
    """The images of some parquet files in their order, an `EncodedSplit`."""

    shards: "tuple[_Shard, ...]"

    def __post_init__(self) -> None:
        if not len(self.labels):
            raise DataError(f"{self.shards[0].file} holds no images: the split is empty")

    @cached_property
    def labels(self) -> Labels:
        return np.concatenate([shard.labels for shard in self.shards])

    def images(self) -> Iterator[bytes | None]:
        for shard in self.shards:
            yield from shard.images()

    def where(self, index: int) -> str:
        for shard in self.shards:
            if index < len(shard.labels):
                return f"{shard.file}, row {index}"
            index -= len(shard.labels)
        raise IndexError(index)


@dataclass(frozen=True)
class _Shard:
    """One parquet file, with everything loaded but its images."""

    file: Path
    image_column: str
    names: tuple[str, ...] | None
    labels: Labels

    @classmethod
    def open(cls, file: Path) -> "_Shard":
        import pyarrow as pa  # type: ignore[import-untyped]

        with _opened(file) as parquet:
            schema = parquet.schema_arrow
            image = _column(file, schema, IMAGE_COLUMNS)
            kind = schema.field(image).type
            if not pa.types.is_struct(kind) or kind.get_field_index("bytes") < 0:
                raise DataError(
                    f"{file}: column {image!r} is {kind}, expected a struct with the field 'bytes'"
                )
            label = _column(file, schema, LABEL_COLUMNS)
            if not pa.types.is_integer(schema.field(label).type):
                raise DataError(
                    f"{file}: column {label!r} is {schema.field(label).type}, expected whole "
                    "numbers"
                )
            column = parquet.read(columns=[label]).column(0).combine_chunks()
            if column.null_count:
                row = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0]
                raise DataError(f"{file}, row {row}: there is no label")
            labels = column.to_numpy().astype(np.int64)
            return cls(file, image, _names(schema, label), labels)

    def images(self) -> Iterator[bytes | None]:
        with _opened(self.file) as parquet:
            for batch in parquet.iter_batches(_ROWS, columns=[self.image_column]):
                yield from batch.column(0).field("bytes").to_pylist()


def columns(file: Path) -> list[str]:
    """The names of a file's columns."""
    with _opened(file) as parquet:
        return list(parquet.schema_arrow.names)


def table(file: Path, also: Sequence[str] = ()) -> dict[str, list[Any]]:
    """The columns of text and of whole numbers in a file, by name, all in memory. Labels that are
    numbers become names where the metadata has these.

    Args:
        also: further columns to read, of any type.
    """
    with _opened(file) as parquet:
        schema = parquet.schema_arrow
        read = {name: column.to_pylist() for name, column in _flat_columns(parquet, schema, also)}
    for name, values in read.items():
        if (names := _names(schema, name)) is not None:
            read[name] = [
                names[v] if isinstance(v, int) and 0 <= v < len(names) else v for v in values
            ]
    return read


def _flat_columns(parquet: Any, schema: Any, also: Sequence[str]) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa

    flat = [
        field.name
        for field in schema
        if field.name in also
        or pa.types.is_string(field.type)
        or pa.types.is_large_string(field.type)
        or pa.types.is_integer(field.type)
    ]
    whole = parquet.read(columns=flat)
    yield from ((name, whole.column(name)) for name in flat)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    try:
        with pq.ParquetFile(file) as parquet:
            yield parquet
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{file} cannot be read as a parquet file: {reason}") from error


def _folder_with_parquet(root: Path) -> Path | None:
    inner = sorted(f for f in root.iterdir() if f.is_dir() and not f.name.startswith("."))
    candidates = [folder for folder in (root, *inner) if any(folder.glob("*.parquet"))]
    for preferred in (root, root / "data"):
        if preferred in candidates:
            return preferred
    if len(candidates) > 1:
        names = ", ".join(folder.name for folder in candidates)
        raise DataError(f"{root} holds several data sets, {names}: give the path of one of them")
    return candidates[0] if candidates else None


def _first_split(
    folder: Path, splits: Mapping[str, list[Path]], expected: Sequence[str]
) -> tuple[Path, ...]:
    for name in expected:
        if name in splits:
            _check_complete(splits[name])
            for file in splits[name]:
                _check_parquet(file)
            return tuple(splits[name])
    raise DataError(
        f"{folder} holds parquet files but no {' or '.join(expected)} split: expected files named "
        f"{expected[0]}-00000-of-00001.parquet and so on"
    )


def _check_complete(files: Sequence[Path]) -> None:
    """Refuse a split that lacks a file: an interrupted copy is not a smaller data set."""
    shards = [match for f in files if (match := re.search(r"-(\d+)-of-(\d+)", f.name))]
    numbers = {int(shard[1]) for shard in shards}
    if len({shard[2] for shard in shards}) > 1:
        raise DataError(
            f"{files[0].parent} holds one split divided in two ways, {files[0].name} and "
            f"{files[-1].name}: its images would count twice, so keep only one"
        )
    missing = next(number for number in count() if number not in numbers)
    for number, total in (shard.groups() for shard in shards):
        if missing < int(total):
            raise DataError(
                f"{files[0].parent} is incomplete: of the files {files[0].name.split('-')[0]}-…-"
                f"of-{total}.parquet, number {missing:0{len(number)}} is missing"
            )


def _check_parquet(file: Path) -> None:
    """Refuse other files, however large, by their first and last bytes, and pipes, which would
    hang."""
    try:
        with open_regular(file) as opened:
            begin = opened.read(len(_MAGIC))
            opened.seek(max(0, opened.seek(0, os.SEEK_END) - len(_MAGIC)))
            end = opened.read(len(_MAGIC))
        reason = "" if begin == end == _MAGIC else "it does not begin and end like one"
    except OSError as error:
        reason = str(error.strerror)
    if reason:
        raise DataError(f"{file} cannot be read as a parquet file: {reason}")


def _column(file: Path, schema: Any, expected: tuple[str, ...]) -> str:
    for name in expected:
        if name in schema.names:
            return name
    raise DataError(
        f"{file} has no column {' or '.join(map(repr, expected))}, only {', '.join(schema.names)}"
    )


def _names(schema: Any, label: str) -> tuple[str, ...] | None:
    """The class names, if the metadata has them in the Hub's format."""
    try:
        metadata = json.loads((schema.metadata or {})[b"huggingface"])
        return tuple(map(str, metadata["info"]["features"][label]["names"]))
    except (KeyError, TypeError, ValueError):
        return None


def _class_names(shards: Sequence[_Shard]) -> tuple[str, ...]:
    named = [shard for shard in shards if shard.names is not None]
    for shard in named:
        if shard.names != named[0].names:
            raise DataError(
                f"{shard.file} names different classes than {named[0].file}: the labels of one "
                "data set must mean the same in all its files"
            )
    if named and named[0].names is not None:
        return named[0].names
    _check_countable(shards)
    highest = max(int(shard.labels.max(initial=0)) for shard in shards)
    return tuple(map(str, range(highest + 1)))


def _check_countable(shards: Sequence[_Shard]) -> None:
    """Refuse labels that are not class numbers but ids, larger than there are images: some class
    would have none."""
    images = sum(len(shard.labels) for shard in shards)
    for shard in shards:
        outside = np.flatnonzero(shard.labels >= images)
        if outside.size:
            row = int(outside[0])
            raise DataError(
                f"{shard.file}, row {row}: label {shard.labels[row]} is outside the classes that "
                f"{images} images can have, 0 to {images - 1}, and the files name no classes"
            )

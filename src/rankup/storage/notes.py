"""The notes of a network folder, `about.json`: a title, a description and tags for each task, and
when and by which versions it was saved. They have a seal of their own and are not part of the
network's hash."""

import json
import platform
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rankup.errors import RankupError, StoreError
from rankup.net.about import Note
from rankup.storage import schema
from rankup.storage.atomic import write_json
from rankup.storage.seal import opened, sealed
from rankup.utils.files import read_regular

NOTES = "about.json"

_LARGEST = 1 << 26  # bytes
_LIBRARIES = ("rankup", "torch", "timm", "transformers")
_TEXT = schema.text(100_000)
_NOTE = schema.fields(
    {
        "title": schema.name,
        "description": _TEXT,
        "tags": schema.listed(schema.name, 0, 1000),
        "saved": schema.name,
        "versions": schema.mapping(schema.name),
    }
)


def read(folder: Path) -> dict[str, Note]:
    """The notes of a folder by task. If they are damaged, there is a warning and none are
    returned."""
    try:
        return _read(folder)
    except RankupError as error:
        warnings.warn(f"{error}; the network is loaded without its notes", stacklevel=3)
        return {}


def problems(folder: Path) -> list[str]:
    """A sentence for each thing that is wrong with the notes of a folder."""
    try:
        _read(folder)
    except RankupError as error:
        return [str(error)]
    return []


def update(folder: Path, given: Mapping[str, Note], tasks: Sequence[str]) -> None:
    """Add notes to those of a folder, and write them if anything has changed.

    Args:
        given: notes by task, which replace older ones.
        tasks: the folder's tasks; notes of others are dropped.
    """
    old = read(folder)
    known = {name: note for name, note in {**old, **given}.items() if name in tasks}
    stamped = {name: note if note.saved else _stamped(note) for name, note in known.items()}
    if stamped != old:
        data = {"tasks": {name: asdict(note) for name, note in stamped.items()}}
        write_json(folder / NOTES, sealed(data))


def _stamped(note: Note) -> Note:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    found = {"python": platform.python_version()}
    for library in _LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return replace(note, saved=now, versions=found)


def _read(folder: Path) -> dict[str, Note]:
    path = folder / NOTES
    try:
        data = json.loads(read_regular(path, _LARGEST))
        if not isinstance(data, dict):
            raise ValueError("it is not an object")
        entries: dict[str, Any] = opened(data, path, folder)[0].get("tasks", {})
        schema.mapping(_NOTE)(entries, "tasks")
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is truncated or edited: {error}") from None
    return {name: _note(entry) for name, entry in entries.items()}


def _note(entry: dict[str, Any]) -> Note:
    return Note(**{**entry, "tags": tuple(entry["tags"])})

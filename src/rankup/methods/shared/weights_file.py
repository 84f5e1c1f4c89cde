"""The files of a method on disk: its tensors, and a manifest with their hash.

    manifest.json             who wrote the weights, after how many tasks, and their SHA-256
    weights-0003.safetensors  all tensors, in a file with a new name for every save

A save writes the weights, then replaces the manifest atomically, then removes older weights: a
crash at any moment leaves the old state or the new one whole. Version 0.1 wrote
`weights.safetensors` and no manifest.
"""

import hashlib
import json
import re
import reprlib
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from errno import EFBIG
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch

from rankup.errors import StoreError
from rankup.layers import Tensors
from rankup.methods.shared.layout import is_finite
from rankup.storage import schema
from rankup.storage.atomic import UNFINISHED, is_unfinished, json_bytes, make_folder, write_file
from rankup.storage.manifest import FORMAT, MANIFEST, METHOD_FORMAT, File, format_of, open_manifest
from rankup.storage.seal import seal
from rankup.utils.files import read_regular
from rankup.utils.text import is_printable

_VERSION = 1
_UNSEALED = "weights.safetensors"  # of version 0.1
_NAME = r"weights-(\d{4,9})\.safetensors"
_LARGEST_MANIFEST = 1 << 16  # bytes
_LARGEST_UNSEALED = 1 << 34  # bytes of weights whose size is stated nowhere

_check_manifest = schema.fields(
    {
        "format": schema.one_of(METHOD_FORMAT),
        "version": schema.whole(_VERSION, _VERSION),
        "of": schema.name,
        "tasks": schema.whole(0, 100_000),
        "weights": schema.fields(
            {
                "file": schema.matching(_NAME, "a name like weights-0001.safetensors"),
                "size": schema.whole(0, 2**50),
                "sha256": schema.matching(r"[0-9a-f]{64}", "a SHA-256"),
            }
        ),
    }
)


@dataclass(frozen=True)
class About:
    """Which method and seed wrote weights, and after how many tasks."""

    of: str
    tasks: int


@dataclass(frozen=True)
class Weights:
    """What a method saved."""

    path: Path
    tensors: Tensors
    tasks: int | None  # learned by then; None if version 0.1, which did not say, wrote it


@dataclass(frozen=True)
class _Manifest:
    about: About
    weights: File

    def to_bytes(self) -> bytes:
        about, weights = asdict(self.about), asdict(self.weights)
        data = {"format": METHOD_FORMAT, "version": _VERSION, **about, "weights": weights}
        return json_bytes({**data, "sha256": seal(data)})


def write_weights(folder: Path, tensors: Tensors, about: About) -> None:
    """Write a method's tensors, contiguous and on the CPU, in place of those saved before."""
    # Version 0.1 wrote the same metadata, so the bytes are the same.
    content = safetensors.torch.save(tensors, {"of": about.of})
    if format_of(folder) == FORMAT:
        raise StoreError(f"{folder} holds a grown network: save this method to a folder of its own")
    make_folder(folder)
    old = _last(folder)
    new = _Manifest(about, File.of(_next_name(folder, old), content))
    if old is not None and _is_there(folder, old, new, content):
        new = old
    else:
        write_file(folder / new.weights.file, content)
        write_file(folder / MANIFEST, new.to_bytes())
    # Even if nothing was written: an interrupted save may have left older weights.
    for path in _left_over(folder, new.weights.file):
        with suppress(OSError):  # leftovers do no harm
            path.unlink()


def has_weights(folder: Path) -> bool:
    """Whether the folder holds a complete save; a killed one may leave weights without manifest."""
    return (folder / MANIFEST).exists() or (folder / _UNSEALED).exists()


def is_unsealed(folder: Path) -> bool:
    """Whether a folder was saved by version 0.1, which wrote no manifest."""
    return not (folder / MANIFEST).exists() and (folder / _UNSEALED).exists()


def warn_unsealed(folder: Path) -> None:
    """Warn that damage to the files of version 0.1 cannot be noticed."""
    warnings.warn(
        f"{folder} was saved by version 0.1, without hashes: whether its weights are as they were "
        "written cannot be told",
        stacklevel=3,
    )


def read_weights(folder: Path, of: str) -> Weights:
    """Read what a method wrote, and refuse it if its hash does not match.

    Args:
        of: the method and seed that must have written it.
    """
    if is_unsealed(folder):
        path = folder / _UNSEALED
        content = _read(path, _LARGEST_UNSEALED)
        tensors = _tensors(path, content)
        _refuse_other(path, _writer_of(content, of), of)
        return Weights(path, tensors, None)
    manifest, path, content = _read_sealed(folder)
    _refuse_other(folder / MANIFEST, manifest.about.of, of)
    return Weights(path, _tensors(path, content), manifest.about.tasks)


def verify_weights(folder: Path) -> list[str]:
    """The problems of a method's folder, a sentence each."""
    try:
        if is_unsealed(folder):
            path = folder / _UNSEALED
            content = _read(path, _LARGEST_UNSEALED)
        else:
            _, path, content = _read_sealed(folder)
        tensors = _tensors(path, content)
    except StoreError as error:
        return [str(error)]
    return [
        f"{path}: {reprlib.repr(name)} holds numbers that are not finite"
        for name, tensor in tensors.items()
        if not is_finite(tensor)
    ]


def _last(folder: Path) -> _Manifest | None:
    """The manifest of the last save; None if there is none or it is invalid."""
    try:
        return _read_manifest(folder)
    except StoreError:
        return None


def _is_there(folder: Path, old: _Manifest, new: _Manifest, content: bytes) -> bool:
    """Whether the last save wrote the same content, and its file still has it."""
    if old.about != new.about or old.weights.sha256 != new.weights.sha256:
        return False
    try:
        return read_regular(folder / old.weights.file, old.weights.size) == content
    except OSError:
        return False


def _next_name(folder: Path, old: _Manifest | None) -> str:
    """A name for the weights, other than that of the last save. It depends on the last manifest
    alone, so that a run that was interrupted and resumed ends with the same names as any other."""
    names = [path.name for path in folder.iterdir()] if old is None else [old.weights.file]
    numbers = [int(found[1]) for name in names if (found := re.fullmatch(_NAME, name))]
    if old is None and not (folder / MANIFEST).exists():
        numbers = []  # the first save: any weights are left from an interrupted one
    return f"weights-{max(numbers, default=0) + 1:04}.safetensors"


def _left_over(folder: Path, current: str) -> Iterator[Path]:
    """Weights of older saves, and unfinished files of interrupted ones."""
    for path in list(folder.iterdir()):
        name = path.name[1 : -len(UNFINISHED)] if is_unfinished(path) else path.name
        if path.name != current and (name == _UNSEALED or re.fullmatch(_NAME, name)):
            yield path


def _read_manifest(folder: Path) -> _Manifest:
    path = folder / MANIFEST
    data = open_manifest(path, _read(path, _LARGEST_MANIFEST), METHOD_FORMAT, _VERSION)
    try:
        _check_manifest(data, "")
    except ValueError as error:
        raise StoreError(f"{path} is not a valid manifest: {error}") from error
    return _Manifest(About(data["of"], data["tasks"]), File(**data["weights"]))


def _read_sealed(folder: Path) -> tuple[_Manifest, Path, bytes]:
    manifest = _read_manifest(folder)
    while True:
        try:
            return manifest, *_described(folder, manifest)
        except StoreError:
            # Another process may have saved since, and removed what the manifest described.
            older, manifest = manifest, _read_manifest(folder)
            if manifest == older:
                raise


def _described(folder: Path, manifest: _Manifest) -> tuple[Path, bytes]:
    """The path and content of the weights that a manifest describes."""
    file = manifest.weights
    path = folder / file.file
    content = _read(path, file.size)
    if len(content) < file.size:
        raise StoreError(f"{path} is truncated: {len(content)} of {file.size} bytes are left")
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise StoreError(f"{path} is not the file that was saved: its SHA-256 has changed")
    return path, content


def _read(path: Path, most: int) -> bytes:
    try:
        return read_regular(path, most)
    except FileNotFoundError:
        raise StoreError(f"{path} is missing") from None
    except OSError as error:
        what = "is not the file that was saved" if error.errno == EFBIG else "cannot be read"
        raise StoreError(f"{path} {what}: {error.strerror}") from error


def _tensors(path: Path, content: bytes) -> Tensors:
    try:
        return safetensors.torch.load(content)
    except (safetensors.SafetensorError, LookupError, ValueError, RuntimeError, TypeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise StoreError(f"{path} is truncated or not a safetensors file: {reason}") from error


def _writer_of(content: bytes, of: str) -> str:
    """The method and seed that wrote weights, by the header of a safetensors file; `of` if it does
    not name any, as in the oldest files."""
    length = int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8 : 8 + length])
    return str((header.get("__metadata__") or {}).get("of", of))


def _refuse_other(path: Path, wrote: str, of: str) -> None:
    if wrote != of:
        shown = wrote if is_printable(wrote) and len(wrote) < 200 else reprlib.repr(wrote)
        raise StoreError(f"{path} belongs to {shown}, not to {of}")

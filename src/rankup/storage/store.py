"""A network on disk: one immutable file per task and a manifest.

    manifest.json                what the network is, its tasks in order, every file's SHA-256
    tasks/0001-name.safetensors  what the first task added, and so on
    base.safetensors             the weights kept of a module, if any

A task's file never changes. Learning one more task writes one file, then replaces the manifest
atomically, so that a crash at any moment leaves a whole network. Nothing is ever unpickled.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from errno import EFBIG
from functools import partial
from pathlib import Path
from typing import Any

import filelock
import safetensors
import safetensors.torch
import torch
from torch import nn

from rankup import models, seeds
from rankup.errors import RankupError, StoreError
from rankup.growing.names import folded
from rankup.layers import Tensors, rounding
from rankup.layers.rounding import Store
from rankup.layers.spec import Shapes, Spec, tensor_name
from rankup.net.network import IncrementalNet
from rankup.net.tasks import KnownTask
from rankup.storage.atomic import (
    UNFINISHED,
    is_unfinished,
    make_folder,
    temporary_of,
    write_file,
)
from rankup.storage.manifest import (
    BASE,
    MANIFEST,
    MOST_MEMORY,
    File,
    Manifest,
    task_file,
)
from rankup.utils.files import read_regular

StrPath = str | os.PathLike[str]

_LOCK = ".lock"
_PATIENCE = 10.0  # seconds to wait for another process to finish its save


@dataclass(frozen=True)
class Verification:
    """What `verify` found; true if nothing is wrong."""

    path: Path
    tasks: tuple[str, ...]
    problems: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        if self.problems:
            return "\n".join(self.problems)
        tasks = f"{len(self.tasks)} task{'s' if len(self.tasks) != 1 else ''}"
        return f"{self.path} is whole: {tasks}, every file as it was written"


def save(net: IncrementalNet, path: StrPath) -> None:
    """Save a network to a folder, or the tasks it has learned since it was saved there.

    Args:
        net: a network between two tasks.
        path: the folder, which need not exist.
    """
    folder = _folder(path)
    if not isinstance(net, IncrementalNet):
        raise StoreError(f"save takes a network made by grow, got {type(net).__name__}")
    if net.learning is not None:
        raise StoreError(
            f"task {net.learning!r} is still being learned: commit or abandon it before you save"
        )
    shared = net._shared
    if shared.came_with_module and not shared.is_constant:
        raise StoreError(
            f"{shared.came_with_module[0]!r} came with the module and is stored with the first "
            "task: commit a task before you save"
        )
    there = 0
    try:
        with _locked(folder):
            old = Manifest.read(folder) if (folder / MANIFEST).exists() else None
            there = len(old.tasks) if old else 0
            _save(net, folder, old)
    except OSError as error:
        raise StoreError(
            f"cannot save to {folder}: {error.strerror or error}; "
            + (f"the {there} tasks saved there before are whole" if there else "nothing was saved")
        ) from error


def load(
    path: StrPath, module: nn.Module | None = None, *, most_memory: int = MOST_MEMORY
) -> IncrementalNet:
    """Load a network to answer with, in evaluation mode, checking every file's hash.

    A network that was grown from a module of your own needs one that computes the same, with any
    weights, because nothing in the folder is executed. Buffers that do not belong to the module's
    state (`persistent=False`) are the module's own.

    Args:
        path: a folder that `save` has written; that of a run is `RUN/net`.
        module: one like the network was grown from, if that is of a class of your own.
        most_memory: bytes that the network may take beyond what its files hold, for seeded
            factors and the like: a folder from a stranger may ask for any number of them.
    """
    folder = _folder(path)
    manifest = Manifest.read(folder, most_memory)
    net = _network_without_tasks(folder, manifest, module)
    for part, tensors in zip(net.parts, _read_base(folder, manifest), strict=True):
        part.load_base(tensors)
    if manifest.tasks:
        # All of them at once: tables that grew by a task at a time would be copied as often.
        read = [_read_task(folder, manifest, index) for index in range(len(manifest.tasks))]
        by_part = [[_moved(own, net.device) for own in parts] for parts in zip(*read, strict=True)]
        net._append([task for task, _ in manifest.tasks], by_part)
    net._shared.self_updating.update(manifest.updating)
    net.saved_files.update({file.file: file for file in _files(manifest)})
    return net.eval()


def _folder(path: StrPath) -> Path:
    try:
        return Path(path)
    except TypeError:
        raise StoreError(f"a network's folder must be a path, got {path!r}") from None


def _moved(tensors: Tensors, device: torch.device) -> Tensors:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def verify(
    path: StrPath, module: nn.Module | None = None, *, most_memory: int = MOST_MEMORY
) -> Verification:
    """Check that a network folder is whole: hashes, shapes and order of everything in it.

    It reads every file even when one is broken.

    Args:
        module: as for `load`. It is not needed; without it, whether a module of your own fits the
            network is not checked.
        most_memory: as for `load`.
    """
    folder = _folder(path)
    try:
        manifest = Manifest.read(folder, most_memory)
        if module is not None or manifest.model["model"] is not None:
            _network_without_tasks(folder, manifest, module)
    except StoreError as error:
        return Verification(folder, (), (str(error),))
    problems = []
    for index in range(-1, len(manifest.tasks)):
        try:
            if index < 0:
                _read_base(folder, manifest)
            else:
                _read_task(folder, manifest, index)
        except StoreError as error:
            problems.append(str(error))
    return Verification(folder, tuple(task.name for task, _ in manifest.tasks), tuple(problems))


def _save(net: IncrementalNet, folder: Path, old: Manifest | None) -> None:
    known: dict[str, File] = net.saved_files  # a committed task's file never changes
    tasks = tuple(net._tasks.tasks)  # as they are now: another thread may commit one more
    contents = _contents(net, tasks)
    there = {file.file for file in _files(old)} if old else set()
    written: dict[str, bytes] = {}
    for name, content in contents.items():
        # Described from what is written: somebody may have changed a tensor.
        if name not in known or name not in there:
            written[name] = content()
            known[name] = File.of(name, written[name])
    new = Manifest(
        models.describe(net.body),
        net.dtype,
        net.options,
        net.plan.specs,
        known.get(BASE),
        tuple((task, known[task_file(index, task.name)]) for index, task in enumerate(tasks)),
        tuple(sorted(net._shared.self_updating)),
    )
    if old is not None:
        _refuse_other_network(folder, old, new)
        for file in _files(old):
            if not _is_as_written(folder / file.file, file):  # repaired: it is known what it holds
                written[file.file] = contents[file.file]()
    make_folder(folder / "tasks")
    for name, to_write in written.items():
        write_file(folder / name, to_write)
        _remember(folder / name, known[name])
    if new != old:
        write_file(folder / MANIFEST, new.to_bytes())


def _contents(net: IncrementalNet, tasks: Sequence[KnownTask]) -> dict[str, Callable[[], bytes]]:
    """How to make each file of a network, in the order in which they are written."""
    contents: dict[str, Callable[[], bytes]] = {}
    if net.options.base == "keep":
        contents[BASE] = lambda: _to_bytes(net, [part.base() for part in net.parts])
    for index, task in enumerate(tasks):
        about = {"index": index, **asdict(task)}
        contents[task_file(index, task.name)] = partial(_task_to_bytes, net, index, about)
    return contents


def _task_to_bytes(net: IncrementalNet, index: int, about: dict[str, Any]) -> bytes:
    return _to_bytes(net, [part.added(index) for part in net.parts], about)


def _to_bytes(
    net: IncrementalNet, parts: Sequence[Tensors], about: dict[str, Any] | None = None
) -> bytes:
    """A file of each part's tensors; for a task, together with `about` and in the form that tasks
    have."""
    form: Store = "full" if about is None else net.options.store
    tensors = {
        # Copies, because safetensors refuses views of one table.
        tensor_name(part.spec, name): packed.detach().to("cpu", copy=True).contiguous()
        for part, own in zip(net.parts, parts, strict=True)
        for name, packed in rounding.pack(part.spec, own, form).items()
    }
    if about is None:
        return safetensors.torch.save(tensors)
    # In one entry: the order of several is not defined, and equal tasks must have equal hashes.
    return safetensors.torch.save(tensors, {"task": json.dumps(about)})


def _files(manifest: Manifest) -> Iterator[File]:
    if manifest.base is not None:
        yield manifest.base
    yield from (file for _, file in manifest.tasks)


def _refuse_other_network(folder: Path, old: Manifest, new: Manifest) -> None:
    if replace(old, tasks=(), updating=()) != replace(new, tasks=(), updating=()):
        raise StoreError(f"{folder} holds another network: save this one to a folder of its own")
    if new.tasks[: len(old.tasks)] != old.tasks:
        raise StoreError(
            f"{folder} holds tasks that this network has not learned: save this one to a folder of "
            "its own"
        )


# By path, what a file was like when its hash was last found right: it is not read again until it
# changes, or saving would take longer with every task.
_found_right: dict[str, tuple[int, int, int, str]] = {}


def _is_as_written(path: Path, file: File) -> bool:
    try:
        if _found_right.get(str(path)) == _signature(path, file):
            return True
        if hashlib.sha256(read_regular(path, file.size)).hexdigest() != file.sha256:
            return False
    except OSError:
        return False
    _remember(path, file)
    return True


def _remember(path: Path, file: File) -> None:
    _found_right[str(path)] = _signature(path, file)


def _signature(path: Path, file: File) -> tuple[int, int, int, str]:
    about = path.stat()
    return about.st_size, about.st_mtime_ns, about.st_ino, file.sha256


def _network_without_tasks(
    folder: Path, manifest: Manifest, module: nn.Module | None
) -> IncrementalNet:
    if module is None and manifest.model["model"] is None:
        raise StoreError(
            f"{folder} was grown from a module of your own, a {manifest.model['class']}: pass one "
            "like it with load(path, module=…)"
        )
    if module is None:
        with seeds.seeded_rng(torch.device("cpu"), 0):
            module = models.build(manifest.model).to(manifest.dtype)
    misfit = f"the module does not fit the network in {folder}"
    try:
        net = IncrementalNet(module, manifest.options)
    except RankupError as error:
        raise StoreError(f"{misfit}: {error}") from error
    if net.dtype != manifest.dtype:
        raise StoreError(f"{misfit}: it is in {net.dtype}, but the network is in {manifest.dtype}")
    if net.plan.specs != manifest.specs:
        differing = {(s.name, s) for s in net.plan.specs} ^ {(s.name, s) for s in manifest.specs}
        where = folded(sorted({name for name, _ in differing}))
        raise StoreError(f"{misfit}: they differ in {where or 'the order of their layers'}")
    own = type(net.body).__qualname__
    if (given := manifest.model.get("class", own)) != own:
        warnings.warn(f"{folder} was grown from a {given}, but the module is a {own}", stacklevel=3)
    return net


def _read_base(folder: Path, manifest: Manifest) -> list[Tensors]:
    shapes = [(spec, spec.base_shapes()) for spec in manifest.specs]
    if manifest.base is None:
        return [{} for _ in shapes]
    return _read_tensors(folder, manifest, manifest.base, shapes, "full")


def _read_task(folder: Path, manifest: Manifest, index: int) -> list[Tensors]:
    task, file = manifest.tasks[index]
    shapes = [(spec, spec.shapes(index, task.classes)) for spec in manifest.specs]
    return _read_tensors(folder, manifest, file, shapes, manifest.options.store)


def _read_tensors(
    folder: Path,
    manifest: Manifest,
    file: File,
    expected: Sequence[tuple[Spec, Shapes]],
    form: Store,
) -> list[Tensors]:
    """A file's tensors for each part of the network, every one checked against its spec."""
    path = folder / file.file
    tensors = read_checked(path, file)
    parts: list[Tensors] = []
    for spec, shapes in expected:
        part: Tensors = {}
        for key, shape in shapes.items():
            packed: Tensors = {}
            for own, layout in rounding.layouts(spec, key, shape, form, manifest.dtype).items():
                name = tensor_name(spec, own)
                if name not in tensors:
                    raise StoreError(f"{path} has no tensor {name!r}")
                packed[own] = tensor = tensors.pop(name)
                if tensor.shape != layout.shape:
                    there, wanted = list(tensor.shape), list(layout.shape)
                    raise StoreError(f"{path}: {name!r} is {there}, not {wanted}")
                if layout.dtypes is not None and tensor.dtype not in layout.dtypes:
                    allowed = " or ".join(map(str, layout.dtypes))
                    raise StoreError(f"{path}: {name!r} is {tensor.dtype}, not {allowed}")
            part[key] = rounding.unpack(spec, key, packed, manifest.dtype)
        parts.append(part)
    if tensors:
        raise StoreError(
            f"{path} holds tensors that the network has no place for: {', '.join(tensors)}"
        )
    return parts


def read_checked(path: Path, file: File) -> Tensors:
    try:
        content = read_regular(path, file.size)
    except FileNotFoundError:
        raise StoreError(f"{path} is missing") from None
    except OSError as error:
        what = "is not the file that was saved" if error.errno == EFBIG else "cannot be read"
        raise StoreError(f"{path} {what}: {error.strerror}") from error
    if len(content) < file.size:
        raise StoreError(f"{path} is truncated: {len(content)} of {file.size} bytes are left")
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise StoreError(f"{path} is not the file that was saved: its SHA-256 has changed")
    try:
        return safetensors.torch.load(content)
    except (safetensors.SafetensorError, KeyError, ValueError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise StoreError(f"{path} is not a safetensors file: {reason}") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time; what another left half-done when it died is cleared away."""
    make_folder(folder)
    # Listed once: between two listings another process may commit its first save.
    names = {entry.name for entry in folder.iterdir() if not is_unfinished(entry)}
    if MANIFEST not in names and names - {BASE, _LOCK, "tasks"}:
        raise StoreError(f"{folder} holds other files: save to a new or an empty folder")
    try:
        with filelock.FileLock(folder / _LOCK, timeout=_PATIENCE):
            left_over = (folder / "tasks").glob(f".[0-9]*-*.safetensors{UNFINISHED}")
            for temporary in (*map(temporary_of, (folder / MANIFEST, folder / BASE)), *left_over):
                temporary.unlink(missing_ok=True)
            yield
    except filelock.Timeout:
        raise StoreError(f"another process is saving to {folder}: try again later") from None

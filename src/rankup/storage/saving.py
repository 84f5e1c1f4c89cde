"""Saving a network: write the files that its folder lacks, replace the manifest, then remove files
that the new manifest does not name."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch

from rankup import models
from rankup.errors import StoreError
from rankup.layers import Tensors, rounding
from rankup.layers.rounding import Store
from rankup.layers.spec import tensor_name, trained_with_first
from rankup.net.network import IncrementalNet
from rankup.net.tasks import KnownTask, TaskList
from rankup.storage import notes
from rankup.storage.atomic import make_folder, sync, write_file
from rankup.storage.manifest import BASE, MANIFEST, SUMS_FILE, File, Manifest, task_file
from rankup.storage.reading import base_path
from rankup.storage.routing import row_tensors, sums_bytes, sums_file
from rankup.utils.files import read_regular

Entry = tuple[KnownTask, File]

_TASK_FILE = "*-" + "[0-9a-f]" * 8 + ".safetensors"  # as the second format version names them


def save_changes(
    net: IncrementalNet, folder: Path, old: Manifest | None, base_from: str | None
) -> None:
    """Save a network to a locked folder.

    Args:
        old: the manifest that the folder has, if any.
        base_from: as for `save`.
    """
    if base_from is None and old is not None:
        base_from = old.base_from
    model = models.describe(net.body)
    if old is not None and models.are_alike(old.model, model):
        model = old.model  # it may be of another version of its package, which changes nothing
    new = Manifest(
        model,
        net.dtype,
        net.options,
        net.plan.specs,
        None,
        (),
        tuple(sorted(net._shared.self_updating)),
        net.inputs,
        base_from,
    )
    files = _Files(net, folder, old, new.version)
    if net.options.base == "keep":
        new = replace(new, base=files.of(None))
        if base_from is not None:
            files.leave_base(base_from)
    elif base_from is not None:
        raise StoreError("base_from is for networks that were grown with base='keep'")
    if base_from is not None and new.version == 1:
        raise StoreError("a network of the first format version keeps its base in its folder")
    mine = [(task, files.of(index)) for index, task in enumerate(files.tasks)]
    if old is not None:
        _refuse_other_network(folder, old, new)
        mine = _merged_with_folder(net, folder, old, mine)
    new = replace(new, tasks=tuple(shortened(mine)))
    if (sums := sums_bytes(net)) is not None:
        content, samples = sums
        if len(mine) > len(net.tasks):
            raise StoreError(
                f"{folder} has tasks that this network has not learned, and its router keeps one "
                "sum over all tasks: load it again and learn the new ones there"
            )
        new = replace(new, sums=files.sums(content), samples=samples)
    files.write()
    if new != old:
        write_file(folder / MANIFEST, new.to_bytes())
    notes.update(folder, net.notes, [task.name for task, _ in new.tasks])
    remove_unnamed(folder, old, new)


class _Files:
    """The files that a network needs in a folder. Those that the folder lacks are collected, and
    written by `write`."""

    def __init__(
        self, net: IncrementalNet, folder: Path, old: Manifest | None, version: int
    ) -> None:
        self._net, self._folder, self._version = net, folder, version
        # A copy, because another thread may commit one more.
        self.tasks = [net._tasks.explicit(index) for index in range(len(net.tasks))]
        self._old_files = {file.file: file for file in files_of(old)} if old else {}
        self._unwritten: dict[str, tuple[bytes, File]] = {}

    def of(self, task: int | None) -> File:
        """The file of a task by its index, or of the base for None."""
        known: dict[str, File] = self._net.saved_files  # a committed task's file never changes
        key = BASE if task is None else self.tasks[task].name
        name = BASE if task is None else task_file(task, key, self._version)
        old = self._old_files.get(name)
        is_whole = old is not None and is_as_written(self._folder / name, old)
        if is_whole and known.get(key) == old:
            return known[key]
        # Hashed anew, because somebody may have changed a tensor.
        content = self._content(task)
        known[key] = File.of(name, content)
        if not is_whole or known[key] != old:
            self._unwritten[name] = content, known[key]
        return known[key]

    def sums(self, content: bytes) -> File:
        """The file of a router's sums. Its name has its hash, so it never replaces another one."""
        file = sums_file(content)
        old = self._old_files.get(file.file)
        if old != file or not is_as_written(self._folder / file.file, file):
            self._unwritten[file.file] = content, file
        return file

    def leave_base(self, base_from: str) -> None:
        """Do not write the base, but check that the same one lies elsewhere."""
        path, file = base_path(self._folder, base_from), self._net.saved_files[BASE]
        if path != self._folder / BASE and not is_as_written(path, file):
            raise StoreError(f"{path} is not the base of this network, or cannot be read")
        self._unwritten.pop(BASE, None)

    def write(self) -> None:
        make_folder(self._folder / "tasks")
        for name, (content, file) in self._unwritten.items():
            write_file(self._folder / name, content)
            _remember(self._folder / name, file)

    def _content(self, task: int | None) -> bytes:
        net = self._net
        if task is None:
            return _to_bytes(net, [part.base() for part in net.parts], None, {})
        about = self.tasks[task].said()
        if self._version == 1:
            del about["uses"]
            about = {"index": task, **about}
        parts = [part.added(task) for part in net.parts]
        return _to_bytes(net, parts, about, row_tensors(net, task))


def _to_bytes(
    net: IncrementalNet, parts: Sequence[Tensors], about: dict[str, Any] | None, row: Tensors
) -> bytes:
    """A safetensors file.

    Args:
        parts: the tensors of each layer.
        about: the description of the task that they are of; None for the base, which is not packed.
        row: the router's tensors of the task.
    """
    form: Store = "full" if about is None else net.options.store
    tensors = {
        # Copies, because safetensors refuses views of one table.
        tensor_name(part.spec, name): packed.detach().to("cpu", copy=True).contiguous()
        for part, own in zip(net.parts, parts, strict=True)
        for name, packed in rounding.pack(part.spec, own, form).items()
    }
    tensors |= {name: tensor.contiguous() for name, tensor in row.items()}
    if about is None:
        return safetensors.torch.save(tensors)
    # In one entry: the order of several is not defined, and equal tasks must have equal hashes.
    return safetensors.torch.save(tensors, {"task": json.dumps(about)})


def files_of(manifest: Manifest) -> Iterator[File]:
    """All files that a manifest names."""
    if manifest.base is not None:
        yield manifest.base
    if manifest.sums is not None:
        yield manifest.sums
    yield from (file for _, file in manifest.tasks)


def _refuse_other_network(folder: Path, old: Manifest, new: Manifest) -> None:
    if not old.is_of_same_network(new):
        raise StoreError(f"{folder} holds another network: save this one to a folder of its own")


def _merged_with_folder(
    net: IncrementalNet, folder: Path, old: Manifest, mine: Sequence[Entry]
) -> list[Entry]:
    """The folder's tasks without those that the network has removed, followed by the network's new
    ones. Each names all tasks that it uses."""
    own = {task.name: (task, file) for task, file in mine}
    removed = {file.sha256 for file in net.removed_files}
    known, kept = old.task_list(), list[Entry]()
    for index, (task, file) in enumerate(old.tasks):
        if task.name in own and own[task.name][1] == file:
            kept.append(own.pop(task.name))
        elif file.sha256 not in removed:
            if task.name in own or old.version == 1 or not _fits(net, old, mine):
                raise StoreError(
                    f"{folder} holds tasks that this network has not learned, such as "
                    f"{task.name!r}: save this one to a folder of its own"
                )
            kept.append((known.explicit(index), file))
    merged = [*kept, *own.values()]
    merged_names = {task.name for task, _ in merged}
    for task, _ in merged:
        if missing := {*(task.uses or ())} - merged_names:
            raise StoreError(
                f"task {min(missing)!r} cannot be removed from {folder}: {task.name!r}, which was "
                "saved there, selects from its factors"
            )
    return merged


def _fits(net: IncrementalNet, old: Manifest, mine: Sequence[Entry]) -> bool:
    """Whether tasks of a folder and of a network can be in one network. They cannot if tasks share
    tensors that are trained with the first one, and the first ones differ."""
    if not trained_with_first(net.plan.specs) or not mine:
        return True
    return mine[0][1] == old.tasks[0][1]


def shortened(entries: Sequence[Entry]) -> Iterator[Entry]:
    """Entries in which a task that uses all tasks before it does not name them."""
    tasks = TaskList().following([task for task, _ in entries])
    return zip(tasks, (file for _, file in entries), strict=True)


def remove_unnamed(folder: Path, old: Manifest | None, new: Manifest) -> None:
    """Remove the files of removed tasks and of interrupted saves."""
    named = {folder / file.file for file in files_of(new)}
    before = {folder / file.file for file in files_of(old)} if old else set()
    stale = {path for path in folder.glob("sums-*") if re.fullmatch(SUMS_FILE, path.name)}
    gone = (before | stale | {*(folder / "tasks").glob(_TASK_FILE)}) - named
    for path in gone:
        path.unlink(missing_ok=True)
    for parent in sorted({path.parent for path in gone}):
        sync(parent)


# By path, the signature that a file had when its hash was last checked. A file is not read again
# until its signature changes; otherwise saving would take longer with every task.
_checked: dict[str, tuple[int, int, int, str]] = {}


def is_as_written(path: Path, file: File) -> bool:
    """Whether a file exists and has the size and hash that it was written with."""
    try:
        if _checked.get(str(path)) == _signature(path, file):
            return True
        if hashlib.sha256(read_regular(path, file.size)).hexdigest() != file.sha256:
            return False
    except OSError:
        return False
    _remember(path, file)
    return True


def _remember(path: Path, file: File) -> None:
    _checked[str(path)] = _signature(path, file)


def _signature(path: Path, file: File) -> tuple[int, int, int, str]:
    about = path.stat()
    return about.st_size, about.st_mtime_ns, about.st_ino, file.sha256

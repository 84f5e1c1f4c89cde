"""A network on disk: one immutable file per task and a manifest.

    manifest.json                    what the network is, its tasks, every file's SHA-256
    tasks/name-1a2b3c4d.safetensors  what a task added
    base.safetensors                 the weights kept of a module, if any
    about.json                       titles, descriptions and tags, not part of the network's hash

A task's file never changes, and depends only on the tasks that it selects from. Learning one more
task writes one file, then replaces the manifest atomically, so a crash at any moment leaves a whole
network. Nothing is ever unpickled.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from rankup import models
from rankup.errors import StoreError
from rankup.layers.spec import trained_with_first
from rankup.net.network import IncrementalNet
from rankup.net.tasks import TaskList, listed
from rankup.storage import notes
from rankup.storage.hub import Snapshot
from rankup.storage.lock import locked
from rankup.storage.manifest import BASE, MANIFEST, MOST_MEMORY, Manifest
from rankup.storage.reading import (
    append_tasks,
    network_without_tasks,
    read_base,
    read_sums,
    read_task,
)
from rankup.storage.saving import save_changes
from rankup.utils.hub import SCHEME

StrPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Verification:
    """The result of `verify`; true if nothing is wrong.

    Attributes:
        path: the folder.
        tasks: the names of its tasks.
        problems: a sentence for each thing that is wrong.
    """

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


def save(net: IncrementalNet, path: StrPath, *, base_from: str | None = None) -> None:
    """Save a network to a folder. If it was saved there before, only changes are written.

    Tasks that another process has saved there in the meantime stay: the folder then has both.

    Args:
        net: a network between two tasks.
        path: the folder, which need not exist.
        base_from: for a network with a kept base, another place that has this base: the folder of
            a network, relative to `path` or absolute, or `"hf://user/name"` with `@revision`. The
            base is then not stored again; its SHA-256 is, and is compared on loading.
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
    count = 0
    try:
        with locked(folder):
            old = Manifest.read(folder) if (folder / MANIFEST).exists() else None
            count = len(old.tasks) if old else 0
            save_changes(net, folder, old, base_from)
    except OSError as error:
        raise StoreError(
            f"cannot save to {folder}: {error.strerror or error}; "
            + (f"the {count} tasks saved there before are whole" if count else "nothing was saved")
        ) from error


def load(
    path: StrPath,
    module: nn.Module | None = None,
    *,
    tasks: Sequence[str] | None = None,
    most_memory: int = MOST_MEMORY,
) -> IncrementalNet:
    """Load a network to answer with, in evaluation mode, checking every file's hash.

    A network that was grown from a module of your own needs one that computes the same, with any
    weights, because nothing in the folder is executed. Buffers that do not belong to the module's
    state (`persistent=False`) are the module's own.

    Args:
        path: a folder written by `save`, which for a run is `RUN/net`; or a repository on the
            Hugging Face Hub written by `rankup push`, as `"hf://user/name"` with an optional
            `@revision`, whose files are kept in the Hub's cache.
        module: a module like the one that the network was grown from, if its class is your own.
        tasks: names of tasks to load; those that they select from are loaded, too, and no other
            file is read. By default all.
        most_memory: the most bytes that the network may take beyond what its files hold, such as
            for seeded factors, of which a folder from a stranger may claim any number.
    """
    place = located(path)
    remote = place if isinstance(place, Snapshot) else None
    folder = Path(place)
    manifest = Manifest.read(folder, most_memory)
    known = manifest.task_list()
    wanted = _wanted(folder, manifest, known, tasks)
    if remote:
        remote.fetch([manifest.tasks[index][1].file for index in wanted], manifest)
    net = network_without_tasks(folder, manifest, module)
    if len(wanted) < len(manifest.tasks) and manifest.sums is not None:
        net.router = None  # the sums are over all tasks: with some of them nothing can be guessed
    for part, tensors in zip(net.parts, read_base(folder, manifest), strict=True):
        part.load_base(tensors)
    append_tasks(net, folder, manifest, known, wanted)
    net._shared.self_updating.update(manifest.updating)
    net.inputs = manifest.inputs or net.inputs
    net.notes = {k: n for k, n in notes.read(folder).items() if k in net.tasks}
    if manifest.base is not None:
        net.saved_files[BASE] = manifest.base
    return net.eval()


def located(path: StrPath) -> StrPath:
    """A path for `load` at which a network's manifest and notes lie. For `hf://user/name` they are
    downloaded, and the result stays at that commit."""
    if isinstance(path, str) and path.startswith(SCHEME):
        return Snapshot.of(path)
    return path if isinstance(path, Snapshot) else _folder(path)


def _wanted(
    folder: Path, manifest: Manifest, known: TaskList, tasks: Sequence[str] | None
) -> list[int]:
    """The indices of tasks and of all tasks that they need, in the manifest's order."""
    if tasks is None:
        return list(range(len(known.tasks)))
    if isinstance(tasks, str):
        raise StoreError(f"tasks must be a list of names, got {tasks!r}")
    if unknown := [task for task in tasks if task not in known.names]:
        raise StoreError(f"{folder} has no task {unknown[0]!r}, only {listed(known.names)}")
    wanted = {known.index(task) for task in tasks}
    if known.tasks and trained_with_first(manifest.specs):
        wanted.add(0)
    for index in range(len(known.tasks) - 1, -1, -1):  # what a task uses comes before it
        if index in wanted:
            wanted.update(map(known.index, known.uses(index)))
    return sorted(wanted)


def _folder(path: StrPath) -> Path:
    if isinstance(path, str) and path.startswith(SCHEME):
        raise StoreError(f"{path} is on the Hugging Face Hub, expected a folder: see `rankup push`")
    try:
        return Path(path)
    except TypeError:
        raise StoreError(f"a network's folder must be a path, got {path!r}") from None


def verify(
    path: StrPath, module: nn.Module | None = None, *, most_memory: int = MOST_MEMORY
) -> Verification:
    """Check the hashes, shapes and order of everything in a network folder.

    All files are read, even if some are broken.

    Args:
        module: as for `load`, but optional: without it, whether a module of your own fits the
            network is not checked.
        most_memory: as for `load`.
    """
    folder = _folder(path)
    try:
        manifest = Manifest.read(folder, most_memory)
        if module is not None or models.can_build(manifest.model):
            network_without_tasks(folder, manifest, module)
    except StoreError as error:
        return Verification(folder, (), (str(error),))
    problems, known = notes.problems(folder), manifest.task_list()
    for index in range(-1, len(manifest.tasks)):
        try:
            if index < 0:
                read_base(folder, manifest)
                read_sums(folder, manifest)
            else:
                read_task(folder, manifest, known, index)
        except StoreError as error:
            problems.append(str(error))
    return Verification(folder, tuple(task.name for task, _ in manifest.tasks), tuple(problems))

"""Removing tasks from a network's folder, and adding those of another network's folder, without
loading either: files are removed or copied, and the manifest is replaced."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rankup.data.inputs import Input
from rankup.errors import RankupError, StoreError
from rankup.layers.spec import trained_with_first
from rankup.net.moving import refuse_removal
from rankup.storage import notes
from rankup.storage.atomic import make_folder, write_file
from rankup.storage.lock import locked
from rankup.storage.manifest import MANIFEST, File, Manifest, is_of_network
from rankup.storage.reading import base_path, read_content
from rankup.storage.saving import Entry, remove_unnamed, shortened


@dataclass(frozen=True)
class Edit:
    """A change to a folder, which `carry_out` makes.

    Attributes:
        folder: that is changed.
        old: the manifest that it has; None if there is no network yet.
        new: the manifest that it will have.
        copies: files that it lacks, and the paths to copy them from.
        notes_from: a folder that may have notes of added tasks.
    """

    folder: Path
    old: Manifest | None
    new: Manifest
    copies: tuple[tuple[File, Path], ...] = ()
    notes_from: Path | None = None

    def carry_out(self) -> None:
        """Copy what is missing, replace the manifest, then remove what it no longer names."""
        with locked(self.folder):
            now = Manifest.read(self.folder) if is_of_network(self.folder) else None
            if now != self.old:
                raise StoreError(f"{self.folder} was changed meanwhile: run the command again")
            make_folder(self.folder / "tasks")
            for file, source in self.copies:
                write_file(self.folder / file.file, read_content(source, file))
            write_file(self.folder / MANIFEST, self.new.to_bytes())
            theirs = notes.read(self.notes_from) if self.notes_from else {}
            names = [task.name for task, _ in self.new.tasks]
            notes.update(self.folder, theirs | notes.read(self.folder), names)
            remove_unnamed(self.folder, self.old, self.new)


def removal(folder: Path, names: Sequence[str]) -> Edit:
    """Plan to remove tasks. One that others select from cannot be removed without these."""
    manifest = Manifest.read(folder)
    _refuse_sums(manifest, "removed")
    known, left = manifest.task_list(), [*manifest.tasks]
    for index in sorted({known.committed(name) for name in names}, reverse=True):
        refuse_removal(manifest.options, manifest.specs, known, index)
        known.remove(index)
        del left[index]
    tasks = zip(known.tasks, (file for _, file in left), strict=True)
    return Edit(folder, manifest, replace(manifest, tasks=tuple(tasks)))


def joining(folder: Path, other: Path, inputs: Input | None = None) -> Edit:
    """Plan to add those tasks of another network that a folder's network lacks.

    Args:
        folder: of the network; if it has none yet, it gets a copy of the other.
        other: the folder of the other network.
        inputs: how the other network's inputs are prepared, if its manifest does not say so.
    """
    theirs = Manifest.read(other)
    theirs = replace(theirs, inputs=theirs.inputs or inputs)
    mine = Manifest.read(folder) if is_of_network(folder) else None
    _refuse_sums(theirs, "joined")
    start = mine or replace(theirs, tasks=(), base_from=None)
    if mine is not None:
        _refuse_grown_otherwise(mine, theirs)
    new = [*_new_tasks(start, theirs)]
    _refuse_other_first(start, theirs, new)
    entries = [*_explicit(start), *new]
    joined = replace(start, tasks=tuple(shortened(entries)), inputs=start.inputs or theirs.inputs)
    copies = [(file, other / file.file) for _, file in new]
    if mine is None and theirs.base is not None:
        copies.append((theirs.base, base_path(other, theirs.base_from)))
    return Edit(folder, mine, joined, tuple(copies), other)


def _refuse_sums(manifest: Manifest, what: str) -> None:
    """Refuse a network with sums over all tasks, which this module, loading no tensors, cannot
    update."""
    if manifest.sums is not None:
        raise RankupError(
            f"tasks of a network whose router keeps one sum over all of them cannot be {what}; "
            "those of one made with --router analytic,apart can"
        )


def _explicit(manifest: Manifest) -> list[Entry]:
    """The tasks and files of a manifest; each task names all that it uses."""
    known = manifest.task_list()
    return [(known.explicit(index), file) for index, (_, file) in enumerate(manifest.tasks)]


def _new_tasks(mine: Manifest, theirs: Manifest) -> Iterator[Entry]:
    """The tasks that the first network lacks, described as its manifest will describe them."""
    known = {task.name: (task, file) for task, file in _explicit(mine)}
    inputs = mine.inputs or theirs.inputs
    for task, file in _explicit(theirs):
        if task.name not in known:
            # A task without inputs took those of its own network, which may differ here.
            taken = task.about.inputs or theirs.inputs
            about = replace(task.about, inputs=taken) if taken != inputs else task.about
            yield replace(task, about=about), file
        elif (task.said(), file) != (known[task.name][0].said(), known[task.name][1]):
            raise RankupError(f"the networks know different tasks of the name {task.name!r}")


def _refuse_grown_otherwise(mine: Manifest, theirs: Manifest) -> None:
    if 1 in (mine.version, theirs.version):
        raise RankupError("networks of the first format version cannot be joined")
    for what, one, two in (
        ("options", mine.options, theirs.options),
        ("layers", mine.specs, theirs.specs),
        ("dtype", mine.dtype, theirs.dtype),
        ("kept weights", mine.base, theirs.base),
    ):
        if one != two:
            raise RankupError(f"only networks that were grown alike can be joined: {what} differ")


def _refuse_other_first(mine: Manifest, theirs: Manifest, new: Sequence[Entry]) -> None:
    shared = trained_with_first(mine.specs)
    if shared and mine.tasks and new and mine.tasks[0][0].name != theirs.tasks[0][0].name:
        raise RankupError(
            f"the networks cannot be joined: {shared!r} was trained with the first task of each, "
            "and these differ"
        )

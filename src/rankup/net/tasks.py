"""Names, indices and classes of the tasks that a network knows."""

import operator
import reprlib
import unicodedata
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

from rankup.data.tasks import MOST_CLASSES
from rankup.errors import RankupError, TaskStateError


@dataclass(frozen=True)
class KnownTask:
    name: str
    classes: int


@dataclass
class TaskList:
    """Committed tasks in the order in which they were learned. The one that is being learned, if
    there is one, has the index after them."""

    tasks: list[KnownTask] = field(default_factory=list)
    learning: KnownTask | None = None
    _indices: dict[str, int] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [task.name for task in self.tasks]

    def width(self, task: object) -> int:
        """How many answers a task has, be it committed or being learned."""
        index = self.index(task, or_several=False)
        return (*self.tasks, self.learning)[index].classes  # type: ignore[union-attr]

    def begin(self, name: str, classes: int | None, outputs: int | None = None) -> KnownTask:
        """The task to be learned next, once it is set as `learning`."""
        if self.learning is not None:
            raise TaskStateError(
                f"cannot begin task {name!r} while {self.learning.name!r} is being learned: call "
                "commit_task or abandon_task first"
            )
        if (classes is None) == (outputs is None):
            raise RankupError(
                "a task needs classes, or outputs for any other kind of answer, and not both"
            )
        width = _count("classes", classes, 2) if outputs is None else _count("outputs", outputs, 1)
        return KnownTask(checked_name(name, self._indices), width)

    def in_progress(self, wanted_by: str) -> KnownTask:
        """The task that is being learned, for a method that needs one."""
        if self.learning is None:
            raise TaskStateError(f"no task is being learned: call begin_task before {wanted_by}")
        return self.learning

    def append(self, task: KnownTask) -> None:
        self._indices[task.name] = len(self.tasks)
        self.tasks.append(task)
        self.learning = None

    def index(self, task: object, *, or_several: bool = True) -> int:
        """The index of a task given by name or index, the one being learned included.

        Args:
            or_several: whether a task for each sample would be valid, too.
        """
        if isinstance(task, str):
            if self.learning is not None and task == self.learning.name:
                return len(self.tasks)
            if task not in self._indices:
                only = f"only {_listed(self.names)}" if self.names else "none was learned yet"
                raise RankupError(f"there is no task {task!r}, {only}")
            return self._indices[task]
        try:
            index = operator.index(task)  # type: ignore[arg-type]
        except TypeError:
            several = ", an index, a list of these or a tensor of indices"
            raise RankupError(
                f"task must be a name{several if or_several else ' or an index'}, got "
                f"{reprlib.repr(task)}"
            ) from None
        known = len(self.tasks) + (self.learning is not None)
        if not 0 <= index < known:
            raise RankupError(f"task index {index} is out of range: the network has {known} tasks")
        return index

    def committed(self, task: object) -> int:
        """The index of a committed task; the one being learned is refused."""
        index = self.index(task, or_several=False)
        if index == len(self.tasks):
            assert self.learning is not None
            name = self.learning.name
            raise TaskStateError(f"task {name!r} is still being learned: commit it first")
        return index


def checked_name(name: object, known: Container[str]) -> str:
    if not isinstance(name, str) or not name.strip():
        raise RankupError(f"a task needs a name, got {name!r}")
    if name != name.strip() or any(
        char in "/\\" or unicodedata.category(char).startswith("C") for char in name
    ):
        raise RankupError(
            "a task's name must not contain a slash or a control character, nor start or end with "
            f"a space, got {name!r}"
        )
    if (length := len(name.encode())) > 200:
        raise RankupError(f"a task's name must be at most 200 bytes long, got {length}")
    if name in known:
        raise RankupError(f"there is already a task {name!r}")
    return name


def _count(option: str, given: Any, least: int) -> int:
    try:
        count = 0 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        count = 0
    if count < least:
        raise RankupError(f"{option} must be a whole number of at least {least}, got {given!r}")
    if count > MOST_CLASSES:
        raise RankupError(f"{option} must be at most {MOST_CLASSES:,}, got {count:,}")
    return count


def _listed(names: list[str]) -> str:
    if not names:
        return "none"
    shown = ", ".join(repr(name) for name in names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"

"""The tasks that a network knows: their names, indices, classes, and what each selects from."""

import operator
import reprlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rankup.data.tasks import MOST_CLASSES
from rankup.data.transforms import TURNS
from rankup.errors import RankupError, TaskStateError
from rankup.layers import Selection
from rankup.layers.pruned import Kept
from rankup.net.about import About, check_about
from rankup.rank import Place
from rankup.utils.text import is_printable

# From which tasks' factors a task selects, besides its own: those of all before it, or of some.
Uses = Literal["all", "own"] | Sequence[str | int]


@dataclass(frozen=True)
class KnownTask:
    """A task of a network.

    Attributes:
        uses: the names of the tasks from whose factors it selects, in its own order; None for all
            that the network has before it.
        about: facts about it.
        rotations: whether it is being learned from images in four turns.
        views: from how many turned views it answers.
        kept: for each layer that may drop numbers, how many it kept, by tensor.
    """

    name: str
    classes: int
    uses: tuple[str, ...] | None = None
    about: About = field(default_factory=About)
    rotations: bool = False
    views: int = 1
    kept: Mapping[str, Kept] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """How many rows its head has: one for each class, or for each class in each turn."""
        return self.classes * (TURNS if self.rotations or self.views > 1 else 1)

    def said(self) -> dict[str, Any]:
        """What the task's file says of it, as plain data."""
        said = {"name": self.name, "classes": self.classes, "uses": list(self.uses or ())}
        return said | ({"views": self.views} if self.views > 1 else {})


@dataclass
class TaskList:
    """The committed tasks in the order in which they were learned, and the open one, if there is
    one, which has the index after them."""

    tasks: list[KnownTask] = field(default_factory=list)
    learning: KnownTask | None = None
    has_views: bool = False  # whether any of them answers from several views
    _indices: dict[str, int] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [task.name for task in self.tasks]

    def width(self, task: object) -> int:
        """How many classes or outputs a task has, be it committed or open."""
        return self.at(self.index(task, or_several=False)).classes

    def at(self, index: int) -> KnownTask:
        """The task at an index, be it committed or open."""
        task = self.tasks[index] if index < len(self.tasks) else self.learning
        assert task is not None
        return task

    def begin(
        self,
        name: str,
        classes: int | None,
        outputs: int | None = None,
        uses: Uses = "all",
        about: About | None = None,
        rotations: bool = False,
        views: int = 1,
    ) -> KnownTask:
        """Check the arguments of `begin_task` and return the task. It is not open before it is set
        as `learning`."""
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
        if views not in (1, TURNS) or (views > 1 and not rotations):
            raise RankupError(f"views must be 1, or with rotations 4, got {views!r}")
        about = about or About()
        check_about(name, width, about)
        name, used = checked_name(name, self._indices), self._used(name, uses)
        return KnownTask(name, width, used, about, rotations, views)

    def _used(self, name: str, uses: Uses) -> tuple[str, ...] | None:
        if uses == "all":
            return None
        if uses == "own":
            return () if self.tasks else None
        if isinstance(uses, str) or not isinstance(uses, Sequence):
            raise RankupError(
                f"task {name!r} can use 'all' tasks, only its 'own' factors, or a list of tasks' "
                f"names, got {reprlib.repr(uses)}"
            )
        chosen = tuple(self.tasks[self.committed(task)].name for task in uses)
        if len({*chosen}) < len(chosen):
            raise RankupError(f"task {name!r} cannot use a task twice, got {reprlib.repr(uses)}")
        return self.shortened(chosen, len(self.tasks))

    def shortened(self, uses: tuple[str, ...], index: int) -> tuple[str, ...] | None:
        """`KnownTask.uses` for a task at an index that uses these: None if they are all before
        it."""
        return None if list(uses) == self.names[:index] else uses

    def explicit(self, index: int) -> KnownTask:
        """The task at an index, with the names of all tasks that it uses in place of None."""
        return replace(self.tasks[index], uses=self.uses(index))

    def _copy(self) -> "TaskList":
        """A list of the committed tasks, to append more to it."""
        return TaskList(list(self.tasks), None, self.has_views, dict(self._indices))

    def following(self, tasks: Sequence[KnownTask]) -> list[KnownTask]:
        """Tasks such as `explicit` gives, as they are when appended to this list."""
        known = self._copy()
        for task in tasks:
            assert task.uses is not None
            known.append(replace(task, uses=known.shortened(task.uses, len(known.tasks))))
        return known.tasks[len(self.tasks) :]

    def uses(self, index: int) -> tuple[str, ...]:
        """The names of the tasks that the one at an index selects from."""
        used = self.at(index).uses
        return tuple(self.names[:index]) if used is None else used

    def selection(self, task: KnownTask) -> Selection:
        """The indices of the tasks that one selects from."""
        return None if task.uses is None else tuple(self._indices[name] for name in task.uses)

    def selections(self, tasks: Sequence[KnownTask]) -> list[Selection]:
        """The selections of tasks that are to be appended, which may select from each other."""
        known = self._copy()
        found = []
        for task in tasks:
            found.append(known.selection(task))
            known.append(task)
        return found

    def place(self, task: KnownTask, index: int) -> Place:
        """The place, from which its ranks follow, of a task that is or will be at an index."""
        used = range(index) if task.uses is None else map(self._indices.__getitem__, task.uses)
        roots = [self._is_root(other) for other in used]
        return Place(index == 0, sum(roots), len(roots) - sum(roots))

    def root_count(self) -> int:
        """How many tasks select from no other."""
        return sum(map(self._is_root, range(len(self.tasks))))

    def _is_root(self, index: int) -> bool:
        """Whether the task at an index selects from no other."""
        uses = self.tasks[index].uses
        return not (index if uses is None else uses)

    def users(self, index: int) -> list[str]:
        """The names of the tasks that select from the one at an index."""
        name = self.tasks[index].name
        later = self.tasks[index + 1 :]
        return [task.name for task in later if task.uses is None or name in task.uses]

    def in_progress(self, wanted_by: str) -> KnownTask:
        """The open task; raises if there is none."""
        if self.learning is None:
            raise TaskStateError(f"no task is being learned: call begin_task before {wanted_by}")
        return self.learning

    def append(self, task: KnownTask) -> None:
        self._indices[task.name] = len(self.tasks)
        self.has_views = self.has_views or task.views > 1
        self.tasks.append(task)
        self.learning = None

    def remove(self, index: int) -> None:
        uses = [self.uses(i) for i in range(len(self.tasks))]
        gone = self.tasks[index].name
        del self.tasks[index], uses[index]
        for i, (task, names) in enumerate(zip(self.tasks, uses, strict=True)):
            left = tuple(name for name in names if name != gone)
            self.tasks[i] = replace(task, uses=self.shortened(left, i))
        self._indices = {task.name: i for i, task in enumerate(self.tasks)}
        self.has_views = any(task.views > 1 for task in self.tasks)

    def indices(self, tasks: Sequence[object]) -> list[int]:
        """The index of each task, given by names or indices."""
        try:  # mostly the names of committed tasks
            return [self._indices[task] for task in tasks]  # type: ignore[index]
        except (KeyError, TypeError):
            return [self.index(task) for task in tasks]

    def index(self, task: object, *, or_several: bool = True) -> int:
        """The index of a task given by name or index, be it committed or open.

        Args:
            or_several: whether the caller also takes a task per sample, for the error's text.
        """
        if isinstance(task, str):
            if self.learning is not None and task == self.learning.name:
                return len(self.tasks)
            if task not in self._indices:
                only = f"only {listed(self.names)}" if self.names else "none was learned yet"
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
        """The index of a task given by name or index, which must be committed."""
        index = self.index(task, or_several=False)
        if index == len(self.tasks):
            assert self.learning is not None
            name = self.learning.name
            raise TaskStateError(f"task {name!r} is still being learned: commit it first")
        return index


def checked_name(name: object, known: Container[str]) -> str:
    if not isinstance(name, str) or not name.strip():
        raise RankupError(f"a task needs a name, got {name!r}")
    if name != name.strip() or {*name} & {*"/\\"} or not is_printable(name):
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


def listed(names: Sequence[str]) -> str:
    """A few names, and how many more there are."""
    if not names:
        return "none"
    shown = ", ".join(repr(name) for name in names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"

"""The tasks that a network knows, by name and by index."""

import operator
import reprlib
from dataclasses import dataclass

from rankup.errors import RankupError, TaskStateError
from rankup.net import validate


@dataclass(frozen=True)
class KnownTask:
    name: str
    classes: int


class TaskList:
    """Committed tasks in the order in which they were learned. The one that is being learned, if
    there is one, has the index after them."""

    def __init__(self) -> None:
        self.tasks: list[KnownTask] = []
        self.learning: KnownTask | None = None
        self._indices: dict[str, int] = {}
        self.narrowest = self.widest = 0  # the tasks with the fewest and with the most classes

    @property
    def names(self) -> list[str]:
        return [task.name for task in self.tasks]

    def begin(self, name: str, classes: int) -> KnownTask:
        """The task to be learned next, once it is set as `learning`."""
        if self.learning is not None:
            raise TaskStateError(
                f"cannot begin task {name!r} while {self.learning.name!r} is being learned: call "
                "commit_task or abandon_task first"
            )
        return KnownTask(validate.task_name(name, self._indices), validate.class_count(classes))

    def opened(self, wanted: str) -> KnownTask:
        """The task that is being learned, for a method that needs one."""
        if self.learning is None:
            raise TaskStateError(f"no task is being learned: call begin_task before {wanted}")
        return self.learning

    def append(self, task: KnownTask) -> None:
        index = self._indices[task.name] = len(self.tasks)
        if not self.tasks or task.classes < self.tasks[self.narrowest].classes:
            self.narrowest = index
        if not self.tasks or task.classes > self.tasks[self.widest].classes:
            self.widest = index
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
                only = (
                    f"only {validate.listed(self.names)}" if self.names else "none was learned yet"
                )
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

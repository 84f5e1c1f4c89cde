"""The accuracy matrix with the paper's averages over it, and the storage of a method."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rankup.errors import RankupError


@dataclass
class AccuracyMatrix:
    """Accuracy on every task after learning each task, as fractions.

    `rows[t][j]` is the accuracy on task j after learning task t, for j up to t. In arguments, tasks
    are counted from 1 as in the paper; `t` is the last task by default.

    >>> matrix = AccuracyMatrix()
    >>> matrix.add([0.9])
    >>> matrix.add([0.7, 0.8])
    >>> round(matrix.average_accuracy(), 4), round(matrix.forgetting(), 4)
    (0.75, 0.2)
    """

    rows: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rows, self.rows = self.rows, []
        for row in rows:
            self.add(row)

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, row: Sequence[float]) -> None:
        """Add the accuracies on tasks 1 to t after learning task t."""
        task = len(self.rows) + 1
        if isinstance(row, str) or not isinstance(row, Sequence | np.ndarray):
            raise RankupError(f"a row of accuracies is expected after task {task}, got {row!r}")
        if len(row) != task:
            raise RankupError(
                f"after task {task} an accuracy for each of {task} tasks is expected, "
                f"got {len(row)}"
            )
        self.rows.append([_fraction(entry) for entry in row])

    def average_accuracy(self, t: int | None = None) -> float:
        """The paper's A_t: the mean of a[t, j] over the tasks learned so far."""
        row = self._row(t)
        return sum(row) / len(row)

    def average_accuracies(self) -> npt.NDArray[np.float64]:
        """`[T]`: A_t after each task."""
        return np.array([self.average_accuracy(t) for t in range(1, len(self) + 1)])

    def forgetting(self, t: int | None = None) -> float:
        """The paper's F_t: the mean over j < t of a[j, j] − a[t, j], and F_1 = 0.

        Tasks that improve after they were learned make it negative. Some other papers take the
        maximum over all earlier t in place of a[j, j], which is never smaller.
        """
        row = self._row(t)
        lost = [self.rows[j][j] - accuracy for j, accuracy in enumerate(row[:-1])]
        return sum(lost) / len(lost) if lost else 0.0

    def backward_transfer(self, t: int | None = None) -> float:
        """The mean over j < t of a[t, j] − a[j, j], which is −F_t; 0 for the first task."""
        return 0.0 - self.forgetting(t)  # a negation would turn 0.0 into -0.0

    def forward_transfer(self, independent: Sequence[float]) -> float:
        """The mean over j of a[j, j] minus the accuracy of an independent network on task j."""
        if len(independent) != len(self._row(None)):
            raise RankupError(
                f"an independent network's accuracy is expected for each of {len(self)} tasks, "
                f"got {len(independent)}"
            )
        gained = [self.rows[j][j] - _fraction(alone) for j, alone in enumerate(independent)]
        return sum(gained) / len(gained)

    def as_array(self) -> npt.NDArray[np.float64]:
        """The matrix as an array `[T, T]`, with NaN above the diagonal."""
        array = np.full((len(self), len(self)), np.nan)
        for t, row in enumerate(self.rows):
            array[t, : t + 1] = row
        return array

    def _row(self, t: int | None) -> list[float]:
        if not self.rows:
            raise RankupError("no task has been learned yet: the accuracy matrix is empty")
        if t is None:
            return self.rows[-1]
        if not 1 <= t <= len(self.rows):
            raise RankupError(f"t must be between 1 and the {len(self)} tasks learned, got {t}")
        return self.rows[t - 1]


@dataclass(frozen=True)
class Footprint:
    """Storage of a method, in float32 numbers. A number that is stored in fewer bits counts as a
    fraction.

    Attributes:
        parameters: everything that is needed to run all tasks and to learn the next.
        buffer: the replay memory.
    """

    parameters: float
    buffer: float = 0


def numbers(bytes: int) -> float:
    """Convert bytes to float32 numbers, the unit in which the storage of all methods is counted.

    >>> numbers(10)
    2.5
    """
    return bytes / 4


def _fraction(value: object) -> float:
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not is_number or not 0 <= float(value) <= 1:  # type: ignore[arg-type]
        raise RankupError(f"an accuracy must be a fraction between 0 and 1, got {value!r}")
    return float(value)  # type: ignore[arg-type]

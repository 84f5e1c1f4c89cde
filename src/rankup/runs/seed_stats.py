"""Results of several seeds taken together."""

import statistics
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from rankup.metrics import AccuracyMatrix
from rankup.runs.read import Array


class OfASeed(Protocol):
    @property
    def matrix(self) -> AccuracyMatrix: ...
    @property
    def parameters(self) -> float: ...
    @property
    def buffer(self) -> float: ...
    @property
    def seconds(self) -> float: ...


class OverSeeds:
    """Means over the runs of a setting, and what each seed reached."""

    runs: Sequence[OfASeed]

    @property
    def accuracy(self) -> list[float]:
        """Each seed's average over all tasks, after the last."""
        return [run.matrix.average_accuracy() for run in self.runs]

    @property
    def forgetting(self) -> list[float]:
        return [run.matrix.forgetting() for run in self.runs]

    @property
    def averages(self) -> Array:
        """`[S, T]`: A_t of each seed after each task."""
        return np.array([run.matrix.average_accuracies() for run in self.runs])

    @property
    def matrix(self) -> Array:
        """`[T, T]`: the mean of the seeds' accuracy matrices."""
        mean: Array = np.mean([run.matrix.as_array() for run in self.runs], axis=0)
        return mean

    @property
    def parameters(self) -> float:
        return statistics.mean(run.parameters for run in self.runs)

    @property
    def buffer(self) -> float:
        return statistics.mean(run.buffer for run in self.runs)

    @property
    def seconds(self) -> float:
        """How long a seed took, on average."""
        return statistics.mean(run.seconds for run in self.runs)

"""The base class of routers, and the batches and examples that they are given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rankup.errors import RankupError
from rankup.growing.routing import RouterRule
from rankup.layers import Tensors
from rankup.layers.task_context import head_inputs
from rankup.net.groups import Arguments
from rankup.net.routers.features import pooled, represented

if TYPE_CHECKING:
    from rankup.net.network import IncrementalNet
    from rankup.net.routers.routing import Routing

# For each tensor that is stored per task, its allowed dtypes and its shape, None for any size.
Layouts = dict[str, tuple[tuple[torch.dtype, ...], tuple[int | None, ...]]]
# Each call yields batches of inputs, their classes and the module's other arguments.
Batches = Callable[[], Iterable[tuple[Tensor, Tensor, dict[str, Any]]]]


@dataclass(frozen=True)
class Examples:
    """A task's inputs with their classes, from which a router learns.

    Attributes:
        train: what the task was learned from.
        held_out: what it was not learned from. Scores are centred and scaled by these.
    """

    train: Batches
    held_out: Batches


class TaskOutput(NamedTuple):
    """A network's output for one task."""

    logits: Tensor  # [B, C]
    features: Tensor  # [B, in]: the inputs of its head


class RoutedBatch:
    """A batch whose tasks are to be guessed. The network runs at most once for each task.

    Attributes:
        wanted: `[B, T]`, which tasks are candidates for each sample; None if all are. It is on the
            CPU, so that a GPU is waited for once, not for every task.
        cache: results that routers compute once, by name.
    """

    def __init__(
        self, net: IncrementalNet, routing: Routing, x: Tensor, options: dict[str, Any]
    ) -> None:
        self.net, self.routing, self.x, self.options = net, routing, x, options
        self.wanted: Tensor | None = None
        self.cache: dict[str, Any] = {}
        self._outputs: dict[int, TaskOutput] = {}

    def narrow_to(self, votes: Tensor) -> None:
        """For each sample, leave only tasks with finite votes, `[B, T]`, as candidates."""
        finite = votes.isfinite().cpu()
        self.wanted = None if bool(finite.all()) else finite

    def asks(self, task: int) -> bool:
        """Whether a task is a candidate for any sample."""
        return self.wanted is None or bool(self.wanted[:, task].any())

    def representation(self) -> Tensor:
        """The inputs as routers compare them without running the network for a task."""
        if "represented" not in self.cache:
            self.cache["represented"] = represented(self.net, self.x, self.options)
        found: Tensor = self.cache["represented"]
        return found

    def of(self, task: int) -> TaskOutput:
        """The network's output for a task, zero for samples of which it is no candidate."""
        if task not in self._outputs:
            self._outputs[task] = self._run(task)
        return self._outputs[task]

    def _run(self, task: int) -> TaskOutput:
        if self.wanted is None:
            return run_for(self.net, self.x, task, self.options)
        places = self.wanted[:, task].nonzero()[:, 0].to(self.x.device)
        if not len(places):
            classes = self.net._tasks.tasks[task].classes
            nothing = self.x.new_zeros(len(self.x), classes, dtype=self.net.dtype)
            return TaskOutput(nothing, nothing[:, :0])
        given = Arguments(self.x, self.options, len(self.x), {}).of(places)
        part = run_for(self.net, given[0], task, given[1])
        return TaskOutput(*(_spread(tensor, places, len(self.x)) for tensor in part))


def _spread(rows: Tensor, places: Tensor, count: int) -> Tensor:
    return rows.new_zeros(count, *rows.shape[1:]).index_copy_(0, places, rows)


def run_for(net: IncrementalNet, x: Tensor, task: int, options: dict[str, Any]) -> TaskOutput:
    """Run a network for a task on its one-task path, whose bits never change."""
    with head_inputs() as seen:
        answer = net(x, task=task, **options)
    # If the task answers from several turned views, the first B rows are the inputs as they are.
    return TaskOutput(_logits(answer, x), pooled(seen[-1][: len(x)]))


def _logits(answer: Any, x: Tensor) -> Tensor:
    found = answer["logits"] if isinstance(answer, dict) and "logits" in answer else answer
    found = getattr(found, "logits", found)
    if not isinstance(found, Tensor) or found.dim() != 2 or len(found) != len(x):
        shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise RankupError(
            f"a task is guessed by logits of shape [{len(x)}, classes], but the module answers "
            f"with {shape}"
        )
    return found


class Router(ABC):
    """One way to tell how well inputs fit each task.

    `learn` makes the tensors that are stored of a task when it is committed; they never change.
    From them, `fits` scores a batch for a task. Scores of all tasks are centred and scaled, and
    `votes` turns them into log-probabilities up to a constant.
    """

    name: str
    runs_tasks = True  # whether `fits` runs the network for the task, which takes time
    # Centre and scale of its scores; None to take those of each task's held-out samples.
    scaling: tuple[float, float] | None = None

    def __init__(self, rule: RouterRule, seed: int) -> None:
        self.rule, self.seed = rule, seed

    @abstractmethod
    def learn(self, net: IncrementalNet, task: int, examples: Examples) -> Tensors:
        """The tensors to store of a task, which has just been committed."""

    @abstractmethod
    def fits(self, batch: RoutedBatch, task: int, row: Tensors) -> Tensor:
        """`[B]`: how well samples fit a task; higher is better. `row` is what `learn` gave."""

    def votes(self, batch: RoutedBatch, fits: Tensor) -> Tensor:
        """`[B, T]`: the log-probability of each task, up to a constant. `fits [B, T]` are centred
        and scaled."""
        return fits

    def class_votes(self, batch: RoutedBatch, task: int) -> Tensor | None:
        """`[B, C]`: the log-probability of each class of a task, up to a constant; None if the
        router does not tell classes apart."""
        return None

    def layouts(self, classes: int) -> Layouts:
        """The dtypes and shapes of what `learn` gives for a task with that many classes."""
        return {}

    def check(self, row: Tensors, others: Sequence[Tensors]) -> None:
        """Raise `ValueError` if what is stored of a task does not fit what is stored of others."""
        for key in self.layouts(1):
            if others and row[key].shape[1:] != others[0][key].shape[1:]:
                raise ValueError(f"{key!r} is of other inputs than that of other tasks")

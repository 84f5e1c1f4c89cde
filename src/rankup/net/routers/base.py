"""What all routers have in common, and what they are given to look at."""

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
from rankup.net.routers.features import represented

if TYPE_CHECKING:
    from rankup.net.network import IncrementalNet
    from rankup.net.routers.routing import Routing

# The allowed dtypes and the shape of each tensor stored of a task; None for any size.
Layouts = dict[str, tuple[tuple[torch.dtype, ...], tuple[int | None, ...]]]
# Yields batches of inputs with their classes and the module's own options, as often as it is asked.
Batches = Callable[[], Iterable[tuple[Tensor, Tensor, dict[str, Any]]]]


@dataclass(frozen=True)
class Examples:
    """A task's inputs with their classes, of which a router keeps sums and means.

    Attributes:
        train: what the task was learned from.
        held_out: what it was not learned from. Scores are centred and scaled by these.
    """

    train: Batches
    held_out: Batches


class Seen(NamedTuple):
    """What a network makes of inputs for one task."""

    logits: Tensor  # [B, C]
    features: Tensor  # [B, in]: what its head sees


class Looks:
    """A batch as the tasks of a network see it; each runs at most once.

    Attributes:
        wanted: `[B, T]`, on the CPU, so that a GPU is waited for once, not for every task: which
            tasks to ask about each sample; None for all.
    """

    def __init__(
        self, net: IncrementalNet, routing: Routing, x: Tensor, options: dict[str, Any]
    ) -> None:
        self.net, self.routing, self.x, self.options = net, routing, x, options
        self.wanted: Tensor | None = None
        self.noted: dict[str, Any] = {}  # what routers compute once
        self._seen: dict[int, Seen] = {}

    def narrow_to(self, votes: Tensor) -> None:
        """Ask about a sample only the tasks that have finite votes, `[B, T]`."""
        finite = votes.isfinite().cpu()
        self.wanted = None if bool(finite.all()) else finite

    def asks(self, task: int) -> bool:
        """Whether any sample is to be asked about a task."""
        return self.wanted is None or bool(self.wanted[:, task].any())

    def representation(self) -> Tensor:
        """What routers see of the inputs without any task."""
        if "represented" not in self.noted:
            self.noted["represented"] = represented(self.net, self.x, self.options)
        found: Tensor = self.noted["represented"]
        return found

    def of(self, task: int) -> Seen:
        """What the network makes of the samples for a task, zero for those that are not to be
        asked about it."""
        if task not in self._seen:
            self._seen[task] = self._run(task)
        return self._seen[task]

    def _run(self, task: int) -> Seen:
        if self.wanted is None:
            return run_for(self.net, self.x, task, self.options)
        places = self.wanted[:, task].nonzero()[:, 0].to(self.x.device)
        if not len(places):
            classes = self.net._tasks.tasks[task].classes
            nothing = self.x.new_zeros(len(self.x), classes, dtype=self.net.dtype)
            return Seen(nothing, nothing[:, :0])
        given = Arguments(self.x, self.options, len(self.x), {}).of(places)
        part = run_for(self.net, given[0], task, given[1])
        return Seen(*(_spread(tensor, places, len(self.x)) for tensor in part))


def _spread(rows: Tensor, places: Tensor, count: int) -> Tensor:
    return rows.new_zeros(count, *rows.shape[1:]).index_copy_(0, places, rows)


def run_for(net: IncrementalNet, x: Tensor, task: int, options: dict[str, Any]) -> Seen:
    """Run a network for a task on its one-task path, whose bits never change."""
    with head_inputs() as seen:
        answer = net(x, task=task, **options)
    # Of several views of the inputs the first is of them as they are.
    return Seen(_logits(answer, x), _pooled(seen[-1][: len(x)]))


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


def _pooled(features: Tensor) -> Tensor:
    """A head's inputs as a vector for each sample: the mean over positions, if there are any."""
    return features if features.dim() == 2 else features.flatten(1, -2).mean(1)


class Router(ABC):
    """One way to say how well inputs fit each task. What it needs of a task is in tensors that it
    makes when that is committed and that never change."""

    name: str
    runs_tasks = True  # whether it asks the network about every task, which takes time
    # Centre and scale of its fits, if not those of each task's held-out samples.
    scaling: tuple[float, float] | None = None

    def __init__(self, rule: RouterRule, seed: int) -> None:
        self.rule, self.seed = rule, seed

    @abstractmethod
    def learn(self, net: IncrementalNet, task: int, examples: Examples) -> Tensors:
        """What to store of a task, which has just been committed."""

    @abstractmethod
    def fits(self, looks: Looks, task: int, row: Tensors) -> Tensor:
        """`[B]`: how well samples fit a task, by what was stored of it. More is better."""

    def votes(self, looks: Looks, fits: Tensor) -> Tensor:
        """`[B, T]`: how much speaks for each task, in natural logarithms; `fits` are those of all
        tasks, centred and scaled."""
        return fits

    def class_votes(self, looks: Looks, task: int) -> Tensor | None:
        """`[B, C]`: how much speaks for each class of a task, in natural logarithms; None if the
        router knows no classes."""
        return None

    def layouts(self, classes: int) -> Layouts:
        """What is stored of a task with so many classes."""
        return {}

    def check(self, row: Tensors, others: Sequence[Tensors]) -> None:
        """Refuse, by a `ValueError`, what is stored of a task if it does not fit other tasks'."""
        for key in self.layouts(1):
            if others and row[key].shape[1:] != others[0][key].shape[1:]:
                raise ValueError(f"{key!r} is of other inputs than that of other tasks")

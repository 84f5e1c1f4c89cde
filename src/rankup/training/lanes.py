"""Tasks that are learned at once. Each is a lane, with its own data, random numbers, rates and end,
and its part of a batch of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from rankup import seeds
from rankup.layers import Tensors
from rankup.training.batches import Draws, Feed
from rankup.training.loop import TaskFailed
from rankup.training.recipe import Recipe

if TYPE_CHECKING:
    from rankup.data.tasks import Task
    from rankup.training.fit import NetPupil


@dataclass(eq=False)
class Lane:
    """One of the tasks. Its random numbers and rates are those of learning it alone."""

    pupil: NetPupil
    task: Task
    feed: Feed
    start: Tensors  # what it starts with
    rates: Sequence[float]  # of all its steps
    failure: TaskFailed | None = None
    learned: Tensors | None = None
    _drawn: tuple[int, Draws] | None = None  # the draws of an epoch

    @property
    def recipe(self) -> Recipe:
        return self.pupil.recipe

    @property
    def steps_per_epoch(self) -> int:
        return self.feed.steps_per_epoch

    def learns(self, step: int) -> bool:
        """Whether the task takes a step, counted from 0, with the others."""
        return self.failure is None and step < len(self.rates)

    def left_of_epoch(self, step: int) -> int:
        return self.steps_per_epoch - step % self.steps_per_epoch

    def draws(self, step: int, count: int) -> Draws:
        """The random numbers of `count` steps from `step` on, all in one epoch, `[count, b]`. After
        the task's last step they are valid, but have no meaning."""
        if not self.learns(step):
            drawn = self._of_epoch(0 if self._drawn is None else self._drawn[0])
            return {k: t[:1].expand(count, *t.shape[1:]) for k, t in drawn.items()}
        epoch, first = divmod(step, self.steps_per_epoch)
        return {k: t[first : first + count] for k, t in self._of_epoch(epoch).items()}

    def _of_epoch(self, epoch: int) -> Draws:
        if self._drawn is None or self._drawn[0] != epoch:
            by = self.pupil.seed, self.task.name, epoch
            generator = seeds.epoch_generator(*by, self.feed.device)
            self._drawn = epoch, self.feed.sample_epoch(generator)
        return self._drawn[1]


class Samples:
    """The data of all tasks, one after another, and batches with a part for each task."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._feed = lanes[0].feed
        self._x = torch.cat([lane.feed.x for lane in lanes])
        self._y = torch.cat([lane.feed.task.train_y for lane in lanes])
        self._first = dict[Lane, int]()  # where each task's samples begin
        for lane in lanes:
            self._first[lane] = sum(len(other.feed) for other in self._first)

    def __call__(self, draw: Draws) -> tuple[Tensor, Tensor]:
        """The samples and labels of one step, `[A·b, …]`."""
        return self._feed.batch(self._x, draw), self._y.index_select(0, draw["rows"])

    def draws(self, lanes: Sequence[Lane], step: int, count: int) -> Draws:
        """The random numbers of `count` steps from `step` on, `[count, A·b]`."""
        size = most(lanes)
        own = [self._of(lane, step, count, size) for lane in lanes]
        return {k: torch.stack([draw[k] for draw in own], 1).flatten(1, 2) for k in own[0]}

    def _of(self, lane: Lane, step: int, count: int, size: int) -> Draws:
        draw = lane.draws(step, count)
        gap = size - lane.feed.batch_size
        draw = {k: F.pad(t, (*(0, 0) * (t.dim() - 2), 0, gap)) for k, t in draw.items()}
        return draw | {"rows": draw["rows"] + self._first[lane]}


def most(lanes: Sequence[Lane]) -> int:
    """The largest number of samples that a task has in a batch."""
    return max(lane.feed.batch_size for lane in lanes)


def weights(lanes: Sequence[Lane], device: torch.device) -> Tensor:
    """`[A, b]`: 1 for samples, 0 for what only fills up a task's part of the batch."""
    sizes = torch.tensor([lane.feed.batch_size for lane in lanes], device=device)[:, None]
    return (torch.arange(most(lanes), device=device) < sizes).float()

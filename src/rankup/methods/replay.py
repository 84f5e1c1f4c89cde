"""A memory of a few samples per class and task, and steps that look at it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rankup.data.tasks import Task
from rankup.data.transforms import draw_augmentation, to_float
from rankup.feed import Draws, Feed, take
from rankup.layers import active
from rankup.learner import ModuleLearner, loss_of


class Batch(NamedTuple):
    """Samples, each of a task of its own."""

    x: Tensor
    y: Tensor
    tasks: Tensor  # [B]


class Slots:
    """The places of a memory: equally many for every class of every task, one class after another.
    Whose sample is where so needs no storing."""

    def __init__(self, tasks: Sequence[Task], per_class: int) -> None:
        self.per_class = per_class
        classes = torch.tensor([task.classes for task in tasks])
        self.tasks = torch.arange(len(classes)).repeat_interleave(classes * per_class)
        labels = torch.cat([torch.arange(number) for number in classes.tolist()])
        self.labels = labels.repeat_interleave(per_class)

    def __len__(self) -> int:
        return len(self.tasks)

    def filled(self, learned: int) -> int:
        """How many places are taken once so many tasks were learned."""
        return int((self.tasks < learned).sum())


def remembered(feed: Feed, rows: Tensor) -> Tensor:
    """Some of a task's training inputs as a memory keeps them: transformed, but neither augmented
    nor scaled; as bytes where the data came in bytes."""
    x = feed.task.train_x.index_select(0, rows)
    if feed.task.transform is None:
        return x
    made = feed.task.transform(to_float(x))
    return (made * 255).round().to(torch.uint8) if x.dtype == torch.uint8 else made


class ReplayLearner(ModuleLearner):
    """A module with heads that learn, a task and a memory of earlier ones. Every sample is told
    apart by a tensor of tasks, so that one captured graph serves all tasks but the first.

    Args:
        images: what the memory holds, in the order of its slots.
        replay: how many of its samples a step looks at.
    """

    memory_x: Tensor
    memory_y: Tensor
    memory_tasks: Tensor
    task: Tensor

    def __init__(
        self, body: nn.Module, feed: Feed, index: int, slots: Slots, images: Tensor, replay: int
    ) -> None:
        super().__init__(body, feed, index)
        self.held, self.replay = len(images), replay
        # At its full size from the beginning: shapes stay the same as tasks come in.
        memory = feed.task.train_x.new_zeros(len(slots), *feed.task.train_x.shape[1:])
        memory[: self.held] = images.view(-1, *memory.shape[1:])
        for name, tensor in {
            "memory_x": memory,
            "memory_y": slots.labels.to(feed.device),
            "memory_tasks": slots.tasks.to(feed.device),
            "task": torch.tensor(index, device=feed.device),
        }.items():
            self.register_buffer(name, tensor)
            self._reads[name] = tensor

    def key(self) -> Hashable:
        return super().key(), self.held > 0

    def draws(self, generator: torch.Generator) -> Draws:
        drawn = super().draws(generator)
        if not self.held:
            return drawn
        shape, device = (self.feed.steps, self.replay), generator.device
        drawn["memory"] = torch.randint(self.held, shape, generator=generator, device=device)
        if self._augments_memory:
            count, crop = self.feed.steps * self.replay, self.feed.recipe.crop
            coins, offsets = draw_augmentation(count, crop, generator)
            coins = coins if self.feed.recipe.flip else torch.zeros_like(coins)
            drawn["memory_coins"] = coins.view(shape)
            drawn["memory_offsets"] = offsets.view(*shape, 2)
        return drawn

    def current(self, draw: Draws) -> Batch:
        """The batch of the task being learned."""
        y = take(self.y, draw["rows"])
        return Batch(self.inputs(draw), y, self.task.expand(len(y)))

    def replayed(self, draw: Draws) -> Batch:
        """A batch of the memory."""
        rows = draw["memory"]
        if self._augments_memory:
            drawn = {"rows": rows, "coins": draw["memory_coins"], "offsets": draw["memory_offsets"]}
            x = self.feed.batch(self.memory_x, drawn)
        else:
            x = self.feed.scaled(to_float(take(self.memory_x, rows)))
        if self._convolves and x.is_cuda and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return Batch(x, take(self.memory_y, rows), take(self.memory_tasks, rows))

    def loss(self, batch: Batch) -> Tensor:
        """Every sample is answered by its own task's head."""
        with active(batch.tasks), self._autocast():
            return loss_of(self.feed.recipe, self.body(batch.x), batch.y)

    def forward(self, draw: Draws) -> Tensor:
        """Without a memory, the loss of the task's own batch."""
        return self.loss(self.current(draw))

    @property
    def _augments_memory(self) -> bool:
        # What was transformed before it was remembered cannot be augmented after it.
        return self.feed.recipe.augments and self.feed.task.transform is None

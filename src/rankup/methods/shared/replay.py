"""The base of methods that replay samples from a memory with a few of each class."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rankup import seeds
from rankup.data.tasks import Task
from rankup.data.transforms import to_float
from rankup.errors import RankupError
from rankup.layers import active
from rankup.methods.base import Setting
from rankup.methods.options import ReplayOptions
from rankup.methods.shared.dense import DenseMethod
from rankup.methods.shared.layout import Layout, Layouts
from rankup.training.batches import Draws, Feed, take
from rankup.training.engine.learner import Learner
from rankup.training.engine.module import ModuleLearner, loss_of


class Batch(NamedTuple):
    """Samples, each with its own task."""

    x: Tensor  # [B, …]
    y: Tensor  # [B]
    tasks: Tensor  # [B]


def joined(one: Batch, other: Batch) -> Batch:
    """Two batches as one."""
    return Batch(*(torch.cat(parts) for parts in zip(one, other, strict=True)))


class MemorySlots(Protocol):
    """The task and class of each slot of a memory, `[slots]` each."""

    tasks: Tensor
    labels: Tensor


class Slots:
    """The slots of a memory with the same number for every class of every task, one class after
    another, so that the tasks and classes of samples need not be stored."""

    def __init__(self, tasks: Sequence[Task], per_class: int) -> None:
        classes = torch.tensor([task.classes for task in tasks])
        self.tasks = torch.arange(len(classes)).repeat_interleave(classes * per_class)
        labels = torch.cat([torch.arange(number) for number in classes.tolist()])
        self.labels = labels.repeat_interleave(per_class)


def check_inputs(who: str, tasks: Sequence[Task]) -> None:
    """Refuse tasks whose transformed inputs differ in shape or dtype, so that they cannot be in one
    tensor. Bytes among floats would count as floats of up to 255.

    Args:
        who: the subject of the error message.
    """
    first, *others = tasks
    for task in others:
        for what in ("shape", "dtype"):
            one, other = (getattr(_first_input(t), what) for t in (first, task))
            if one != other:
                raise RankupError(
                    f"{who} needs tasks whose inputs have the same {what}, got {one} in "
                    f"{first.name!r} and {other} in {task.name!r}"
                )


def _first_input(task: Task) -> Tensor:
    """An input with the shape and dtype that it would have in a memory; its values may differ."""
    x = task.train_x[:1]
    return x[0] if task.transform is None else task.transform(to_float(x))[0].to(x.dtype)


def memory_layout(tasks: Sequence[Task], rows: int | range) -> Layout:
    """The layout of a memory with so many rows, or a range, of samples of these tasks."""
    x, transform = tasks[0].train_x[:1], tasks[0].transform
    kept = x if transform is None or x.dtype == torch.uint8 else transform(to_float(x))
    shape = (rows, *_first_input(tasks[0]).shape)
    if kept.dtype != torch.int64 or any(task.transform for task in tasks):
        return Layout(shape, kept.dtype)
    # They may be indices into a table of embeddings: allow only those in the range of the data.
    ends = [end.item() for task in tasks for end in task.train_x.aminmax()]
    return Layout(shape, kept.dtype, min(ends), max(ends))


def rows_by_class(feed: Feed, order: Tensor) -> list[Tensor]:
    """Row indices of a task's training data, a tensor for each class, in the order given.

    Args:
        order: all row indices.
    """
    labels = feed.task.train_y.index_select(0, order)
    rows = [order[labels == label] for label in range(feed.task.classes)]
    for label, of_class in enumerate(rows):
        if not len(of_class):
            raise RankupError(
                f"task {feed.task.name!r} has no training sample of class {label}, but a memory "
                "needs some of every class"
            )
    return rows


def remembered(feed: Feed, rows: Tensor) -> Tensor:
    """The given rows of a task's training inputs as a memory stores them: transformed, but neither
    augmented nor scaled; as bytes if the data are bytes."""
    x = feed.task.train_x.index_select(0, rows)
    if feed.task.transform is None:
        return x
    made = feed.task.transform(to_float(x))
    if x.dtype != torch.uint8:
        return made
    lowest, highest = (float(value) for value in made.aminmax())
    if lowest < -0.001 or highest > 1.001:  # rounding to bytes loses twice as much
        raise RankupError(
            f"task {feed.task.name!r} transforms bytes to values from {lowest:g} to {highest:g}, "
            "but a memory keeps them as bytes, which stand for 0 to 1"
        )
    return (made * 255).round().clamp(0, 255).to(torch.uint8)


class ReplayLearner(ModuleLearner):
    """Learns a task with a memory of earlier ones, in a module with `LearningHeads`. The task of
    every sample is given by a tensor, so that one captured graph serves all tasks but the first.

    Args:
        slots: the task and class of each slot of the memory.
        images: the samples in the memory, in the order of its slots, of which they fill the first.
        replay: how many of them are replayed in each step.

    Attributes:
        held: the number of samples in the memory.
    """

    memory_x: Tensor
    memory_y: Tensor
    memory_tasks: Tensor
    task: Tensor

    def __init__(
        self,
        body: nn.Module,
        feed: Feed,
        index: int,
        slots: MemorySlots,
        images: Tensor,
        replay: int,
    ) -> None:
        super().__init__(body, feed, index)
        self.held, self.replay = len(images), replay
        # At full size from the beginning, so that shapes stay the same when tasks are added.
        memory = feed.task.train_x.new_zeros(len(slots.tasks), *images.shape[1:])
        memory[: self.held] = images
        for name, tensor in {
            "memory_x": memory,
            "memory_y": slots.labels.to(feed.device),
            "memory_tasks": slots.tasks.to(feed.device),
            "task": torch.tensor(index, device=feed.device),
        }.items():
            self.register_input(name, tensor)

    def key(self) -> Hashable:
        return super().key(), self.replay if self.held else None

    def sample_epoch(self, generator: torch.Generator) -> Draws:
        drawn = super().sample_epoch(generator)
        if not self.held:
            return drawn
        # Steps take `replay` samples each from passes over the memory, each in a new random order.
        shape, device = (self.feed.steps_per_epoch, self.replay), generator.device
        count = math.prod(shape)
        passes = math.ceil(count / self.held), self.held
        numbers = torch.rand(passes, generator=generator, device=device, dtype=torch.float32)
        orders = numbers.argsort(1)
        drawn["memory"] = orders.flatten()[:count].view(shape)
        if self._augments_memory:
            coins, offsets = self.feed.augmentation(shape, generator)
            drawn |= {"memory_coins": coins, "memory_offsets": offsets}
        return drawn

    def current(self, draw: Draws) -> Batch:
        """The batch of the task being learned."""
        y = take(self.y, draw["rows"])
        return Batch(self.inputs(draw), y, self.task.expand(len(y)))

    def replayed(self, draw: Draws) -> Batch:
        """A batch from the memory."""
        rows = draw["memory"]
        if self._augments_memory:
            drawn = {"rows": rows, "coins": draw["memory_coins"], "offsets": draw["memory_offsets"]}
            x = self.feed.batch(self.memory_x, drawn)
        else:
            x = self.feed.scaled(self.feed.floats(take(self.memory_x, rows)))
        return Batch(self.formatted(x), take(self.memory_y, rows), take(self.memory_tasks, rows))

    def loss(self, batch: Batch) -> Tensor:
        """The loss, with every sample answered by its own task's head."""
        with active(batch.tasks), self._autocast():
            return loss_of(self.feed.recipe, self.body(batch.x), batch.y)

    def forward(self, draw: Draws) -> Tensor:
        """The loss of the task's own batch, without the memory."""
        return self.loss(self.current(draw))

    @property
    def _augments_memory(self) -> bool:
        # Samples that were transformed before being stored cannot be augmented afterwards.
        return self.feed.recipe.augments and self.feed.task.transform is None


class ReplayMethod(DenseMethod):
    """One dense network, all heads of which keep learning, with a memory of `memory` samples of
    each class of each learned task. Norms are shared; their running averages include replayed
    samples.

    Attributes:
        learner_class: the subclass of `ReplayLearner` that computes the method's loss.
    """

    heads = "learning"
    learner_class: ClassVar[type[ReplayLearner]]

    @classmethod
    def check(cls, setting: Setting) -> None:
        if setting.options_of(ReplayOptions).memory:
            check_inputs("a memory", setting.tasks)

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.options = setting.options_of(ReplayOptions)
        self.slots = Slots(setting.tasks, self.options.memory)

    def learner(self, feed: Feed) -> Learner:
        images = self.buffer.get("images", feed.task.train_x[:0])
        return self.learner_class(
            self.body, feed, self.learned, self.slots, images, self.options.replay
        )

    def consolidate(self, feed: Feed) -> None:
        """Add the last samples of each class in the method's `order` to the memory, repeating them
        if there are too few."""
        count = self.options.memory
        rows = [
            of_class.repeat(math.ceil(count / len(of_class)))[-count:]
            for of_class in rows_by_class(feed, self.order(feed))
        ]
        images = remembered(feed, torch.cat(rows))
        self.buffer = {"images": torch.cat([*self.buffer.values(), images])}

    def kept_layouts(self, learned: int) -> Layouts:
        if not learned or not self.options.memory:
            return {}
        tasks = self.setting.tasks[:learned]
        rows = self.options.memory * sum(task.classes for task in tasks)
        return {"buffer/images": memory_layout(tasks, rows)}

    def order(self, feed: Feed) -> Tensor:
        """The rows of the task's training data in an order that ends with those to remember; by
        default a random one."""
        draw = seeds.generator(self.seed, "memory", self.learned)
        return torch.randperm(len(feed), generator=draw).to(feed.device)

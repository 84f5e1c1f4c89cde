"""Dark experience replay (Buzzega et al., NeurIPS 2020): samples are remembered together with what
the network answered when it was learning them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rankup.layers import Tensors, active
from rankup.methods.base import Setting
from rankup.methods.options import DerOptions
from rankup.methods.shared.dense import DenseMethod
from rankup.methods.shared.heads import FEATURES, LearningHeads
from rankup.methods.shared.layout import Layout, Layouts
from rankup.methods.shared.replay import (
    Batch,
    ReplayLearner,
    check_inputs,
    joined,
    memory_layout,
    remembered,
)
from rankup.training.batches import Draws, Feed, take
from rankup.training.engine.learner import Learner
from rankup.training.engine.module import ModuleLearner, loss_of


class DER(DenseMethod):
    """A sample of every step's batch may enter a reservoir, in which each of all samples that steps
    have seen, those of repeated epochs too, is with the same probability. It is kept as it was
    before augmentation, with the logits that it had in that step. Steps pull the logits of samples
    drawn from the reservoir towards what they were; with `labels`, other samples drawn from it are
    also classified (DER++).

    The authors have one head, and pull all its logits. Here each task has its own, as for all
    methods, and what is learned and remembered are a sample's logits in it. With `among` all tasks
    it is as theirs, for answers without being told the task, but that the softmax is over the
    classes of the tasks so far; the logits of heads to come are remembered as zero.

    `buffer` has its full size, `memory` samples for each class of the stream, from the first task
    on; `seen` counts the samples that were offered to it. Norms are shared; batch norms see the
    task's batch and the remembered samples as one, where the authors run them one by one.
    """

    heads = "learning"
    head: LearningHeads

    @classmethod
    def check(cls, setting: Setting) -> None:
        check_inputs("a memory", setting.tasks)

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.options = setting.options_of(DerOptions)
        self.size = self.options.memory * len(self.head.weight)
        self.logits = Logits(self.head, self.options.among == "all")
        self._learner: DERLearner  # of the open task

    def learner(self, feed: Feed) -> Learner:
        memory = self.buffer or self._empty()
        self._learner = DERLearner(self, feed, memory)
        return self._learner

    def slots(self) -> Slots:
        """The task and label of each remembered sample."""
        if not self.buffer:
            return Slots(*torch.zeros(2, self.size, dtype=torch.int64, device=self.device))
        classes, starts = self.buffer["classes"].long(), self.logits.starts
        tasks = torch.bucketize(classes, starts, right=True) - 1
        return Slots(tasks, classes - starts[tasks])

    def consolidate(self, feed: Feed) -> None:
        """Copy from the task's data what the reservoir now holds of it."""
        learner = self._learner
        images, slots = learner.memory_x.clone(), self.slots()
        classes = self.logits.starts[slots.tasks] + slots.labels
        rows = learner.memory_rows[: self.size]
        if len(new := (rows >= 0).nonzero().flatten()):
            images[new] = remembered(feed, rows[new])
            classes[new] = self.logits.starts[self.learned] + feed.task.train_y[rows[new]]
        self.buffer = {
            "images": images,
            "logits": learner.memory_logits[: self.size].clone(),
            "classes": classes.int(),
            "seen": learner.seen.clone(),
        }

    def kept_layouts(self, learned: int) -> Layouts:
        if not learned:
            return {}
        tasks = self.setting.tasks[:learned]
        last = sum(task.classes for task in tasks) - 1
        return {
            "buffer/images": memory_layout(tasks, self.size),
            "buffer/logits": Layout((self.size, self.logits.width), self.plan.dtype),
            "buffer/classes": Layout((self.size,), torch.int32, 0, last),
            "buffer/seen": Layout((), torch.int64, 0, 2**53),
        }

    def _empty(self) -> Tensors:
        images = memory_layout(self.setting.tasks, self.size)
        shape = [size for size in images.shape if isinstance(size, int)]
        return {
            "images": torch.zeros(shape, dtype=images.dtype, device=self.device),
            "logits": self.head.weight.new_zeros(self.size, self.logits.width),
            "seen": torch.zeros((), dtype=torch.int64, device=self.device),
        }


@dataclass
class Slots:
    """Which task and class the sample in each slot of a reservoir belongs to."""

    tasks: Tensor
    labels: Tensor


class Logits:
    """The logits in which a sample is classified and remembered: those of its own task's head or,
    among all, those of the heads of all tasks so far.

    Args:
        head: the heads.
        among_all: whether tasks are told apart, too.
    """

    def __init__(self, head: LearningHeads, among_all: bool) -> None:
        self.head, self.among_all = head, among_all
        places = torch.arange(len(head.weight), device=head.weight.device)
        self.starts = torch.tensor([rows.start for rows in head.slices], device=places.device)
        stops = torch.tensor([rows.stop for rows in head.slices], device=places.device)
        # Of each task, [T, width]: where its logits are, and which of these it does not have.
        self.columns = places.expand(len(stops), -1) if among_all else head.columns
        self.missing = places >= stops[:, None] if among_all else head.missing
        self.width = self.columns.shape[1]
        # Logits of tasks to come are pulled, too: otherwise they soon exceed all others.
        self.free = torch.zeros_like(self.missing) if among_all else self.missing

    def of(self, features: Tensor, tasks: Tensor) -> Tensor:
        """Samples' logits, `[B, width]`; some may be missing."""
        return self.head.all(features).gather(1, self.columns.index_select(0, tasks))

    def filled(self, logits: Tensor, tasks: Tensor, missing: float) -> Tensor:
        """Logits with a number in place of those that their tasks do not have."""
        return logits.masked_fill(self.missing.index_select(0, tasks), missing)

    def labels(self, labels: Tensor, tasks: Tensor) -> Tensor:
        """Which logit is the right one."""
        return labels + self.starts.index_select(0, tasks) if self.among_all else labels

    def apart(self, logits: Tensor, wanted: Tensor, tasks: Tensor) -> Tensor:
        """How far logits are from others: the mean over samples of their mean square."""
        free = self.free.index_select(0, tasks)
        squares = (logits - wanted).square().masked_fill(free, 0).sum(1)
        return (squares / (~free).sum(1)).mean()


class DERLearner(ReplayLearner):
    """A module with heads that learn, a task and a reservoir. Of this task's samples the reservoir
    holds which rows of its data they are, and their logits."""

    memory_rows: Tensor  # [size + batch], −1 of samples of earlier tasks
    memory_logits: Tensor  # [size + batch, width]
    seen: Tensor

    def __init__(self, method: DER, feed: Feed, memory: Tensors) -> None:
        options, slots = method.options, method.slots()
        super().__init__(method.body, feed, method.learned, slots, memory["images"], options.replay)
        self.options, self.chosen = options, method.logits
        # Before it is full, the free slots stand for the first sample of all: nobody looks there.
        rows = torch.full((self.held + feed.batch_size,), -1 if method.learned else 0)
        spare = memory["logits"].new_zeros(feed.batch_size, method.logits.width)
        self.register_input("memory_rows", rows.to(feed.device))
        self.register_input("memory_logits", torch.cat([memory["logits"], spare]))
        self.register_input("seen", memory["seen"].clone())
        self.mutated += ("memory_rows", "memory_logits", "seen")
        self.replicas = "branches"

    def sample_epoch(self, generator: torch.Generator) -> Draws:
        drawn = ModuleLearner.sample_epoch(self, generator)
        steps, batch = drawn["rows"].shape
        shape = steps, self.replay * (2 if self.options.labels else 1)
        # In float64, as a reservoir may be offered millions of samples.
        place: dict[str, Any] = {"device": generator.device, "dtype": torch.float64}
        drawn["places"] = torch.rand(shape, generator=generator, **place)
        drawn["chances"] = torch.rand(steps, batch, generator=generator, **place)
        if self.feed.recipe.augments:
            coins, offsets = self.feed.augmentation(shape, generator)
            drawn |= {"memory_coins": coins, "memory_offsets": offsets}
        return drawn

    def forward(self, draw: Draws) -> Tensor:
        chosen, options = self.chosen, self.options
        draw = {**draw, "memory": (draw["places"] * self.seen.clamp(max=self.held)).long()}
        batch = joined(self.current(draw), self.replayed(draw))
        with self._autocast(), active(FEATURES):
            logits = chosen.of(self.body(batch.x), batch.tasks)
        logits = logits.to(self.feed.dtype)
        # The task's own samples, those to pull back and, if there are any, those to classify.
        parts = [len(draw["rows"])] + [self.replay] * (2 if options.labels else 1)
        tensors = logits, batch.y, batch.tasks
        now, then, *again = zip(*(torch.split(t, parts) for t in tensors), strict=True)
        wanted = take(self.memory_logits, draw["memory"][: self.replay])
        replayed = options.strength * chosen.apart(then[0], wanted, then[2])
        for part in again:
            replayed = replayed + options.labels * self._surprise(*part)
        loss = self._surprise(*now) + replayed * (self.seen > 0)  # at first there is nothing
        self._offer(draw, chosen.filled(now[0].detach(), now[2], 0))
        return loss

    def replayed(self, draw: Draws) -> Batch:
        """A batch from the reservoir; samples of the open task are taken from its data."""
        old = super().replayed(draw)
        rows = take(self.memory_rows, draw["memory"])
        mine, drawn = rows >= 0, {"rows": rows.clamp(min=0)}
        if self.feed.recipe.augments:
            drawn |= {"coins": draw["memory_coins"], "offsets": draw["memory_offsets"]}
        x = self.inputs(drawn)
        return Batch(
            torch.where(mine.view(-1, *[1] * (x.dim() - 1)), x, old.x),
            torch.where(mine, take(self.y, drawn["rows"]), old.y),
            torch.where(mine, self.task, old.tasks),
        )

    def _surprise(self, logits: Tensor, labels: Tensor, tasks: Tensor) -> Tensor:
        """The loss of classifying samples."""
        told = self.task.expand_as(tasks) if self.chosen.among_all else tasks
        known = self.chosen.filled(logits, told, -math.inf)
        return loss_of(self.feed.recipe, known, self.chosen.labels(labels, tasks))

    @torch.no_grad()
    def _offer(self, draw: Draws, logits: Tensor) -> None:
        """Vitter's reservoir sampling: the n-th sample of all takes one of n places at random, if
        that is among the slots; the first ones take one slot each."""
        in_batch = torch.arange(len(logits), device=logits.device)
        number = self.seen + in_batch
        place = torch.where(number < self.held, number, (draw["chances"] * (number + 1)).long())
        lost = (place >= self.held) | (place[:, None] == place).triu(1).any(1)  # to a later one
        # What gets no slot is put behind them all, as no shape may depend on values.
        place = torch.where(lost, self.held + in_batch, place)
        self.memory_rows.index_copy_(0, place, draw["rows"])
        self.memory_logits.index_copy_(0, place, logits)
        self.seen.add_(len(logits))

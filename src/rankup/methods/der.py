"""DER, dark experience replay (Buzzega et al., *Dark Experience for General Continual Learning: a
Strong, Simple Baseline*, NeurIPS 2020): samples x' are remembered together with the logits z' that
the network had for them in the step that stored them, and later steps are pulled towards these:

    ℓ(f(x), y) + strength · MSE(f(x'), z')

DER++ adds labels · ℓ(f(x''), y'') for further samples from the memory.
"""

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
    """The memory is a reservoir: after every step, each sample that any step has seen so far, in
    repeated epochs too, is in it with the same probability. Samples are stored as they are before
    augmentation.

    The authors have a single head, all logits of which are remembered. Here each task has its own
    head, as in all methods, and a sample's logits are those of its task's head. With
    `among="all"`, for answers without being told the task, they are those of all heads as in the
    paper, except that the softmax is over the classes of the tasks so far, and logits of later
    heads are remembered as zero.

    `buffer` has its full size, `memory` samples for each class of the stream, from the first task
    on; its entry `seen` counts the samples that were offered to it. Norms are shared; batch norms
    see the task's batch and the remembered samples as one batch, where the authors run the network
    on each separately.
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
        """Copy the open task's samples in the reservoir, of which only row indices are stored so
        far, from its data."""
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
    """The task and class of the sample in each slot of a reservoir, `[size]` each."""

    tasks: Tensor
    labels: Tensor


class Logits:
    """Selects the logits with which samples are classified and remembered: those of a sample's own
    task's head, or of all heads.

    Args:
        head: the heads.
        among_all: whether they are those of all heads.

    Attributes:
        width: the number of logits per sample; for single heads that of the widest.
        starts: `[T]`, the first class of each task among the `ΣC` classes of all tasks.
        columns: `[T, width]`, which of the `ΣC` logits belong to a sample of each task.
        missing: `[T, width]`, which of these its task does not have: in narrower heads, or those of
            later tasks.
        free: `[T, width]`, which are left out of the distance to remembered logits.
    """

    def __init__(self, head: LearningHeads, among_all: bool) -> None:
        self.head, self.among_all = head, among_all
        places = torch.arange(len(head.weight), device=head.weight.device)
        self.starts = torch.tensor([rows.start for rows in head.slices], device=places.device)
        stops = torch.tensor([rows.stop for rows in head.slices], device=places.device)
        self.columns = places.expand(len(stops), -1) if among_all else head.columns
        self.missing = places >= stops[:, None] if among_all else head.missing
        self.width = self.columns.shape[1]
        # Logits of later tasks are pulled, too: otherwise they soon exceed all others.
        self.free = torch.zeros_like(self.missing) if among_all else self.missing

    def of(self, features: Tensor, tasks: Tensor) -> Tensor:
        """`[B, width]`: the logits of samples with these features, including missing ones."""
        return self.head.all(features).gather(1, self.columns.index_select(0, tasks))

    def filled(self, logits: Tensor, tasks: Tensor, missing: float) -> Tensor:
        """Logits with missing ones set to the value `missing`."""
        return logits.masked_fill(self.missing.index_select(0, tasks), missing)

    def labels(self, labels: Tensor, tasks: Tensor) -> Tensor:
        """`[B]`: the index of the right logit."""
        return labels + self.starts.index_select(0, tasks) if self.among_all else labels

    def apart(self, logits: Tensor, wanted: Tensor, tasks: Tensor) -> Tensor:
        """The squared distance of logits from wanted ones: the mean over each sample's logits, then
        over samples."""
        free = self.free.index_select(0, tasks)
        squares = (logits - wanted).square().masked_fill(free, 0).sum(1)
        return (squares / (~free).sum(1)).mean()


class DERLearner(ReplayLearner):
    """Learns the open task and updates the reservoir in every step. Samples of the open task are in
    the reservoir as row indices of the task's data, with their logits.

    Attributes:
        memory_rows: `[size + batch]`, those indices; −1 for samples of earlier tasks. The last
            `batch` entries are spare room for samples that do not enter the reservoir.
        memory_logits: `[size + batch, width]`.
        seen: how many samples were offered to the reservoir.
    """

    memory_rows: Tensor
    memory_logits: Tensor
    seen: Tensor

    def __init__(self, method: DER, feed: Feed, memory: Tensors) -> None:
        options, slots = method.options, method.slots()
        super().__init__(method.body, feed, method.learned, slots, memory["images"], options.replay)
        self.options, self.chosen = options, method.logits
        # In the first task, 0 for slots that are still free: any valid index, as none is drawn.
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
        # The task's batch, remembered samples to pull and, for DER++, further ones to classify.
        parts = [len(draw["rows"])] + [self.replay] * (2 if options.labels else 1)
        tensors = logits, batch.y, batch.tasks
        batch_part, pulled, *classified = zip(
            *(torch.split(t, parts) for t in tensors), strict=True
        )
        wanted = take(self.memory_logits, draw["memory"][: self.replay])
        replayed = options.strength * chosen.apart(pulled[0], wanted, pulled[2])
        for part in classified:
            replayed = replayed + options.labels * self._classification(*part)
        # In the very first step the reservoir is empty.
        loss = self._classification(*batch_part) + replayed * (self.seen > 0)
        self._offer(draw, chosen.filled(batch_part[0].detach(), batch_part[2], 0))
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

    def _classification(self, logits: Tensor, labels: Tensor, tasks: Tensor) -> Tensor:
        """The loss of classifying samples."""
        # Among all heads, those of tasks up to the open one.
        latest = self.task.expand_as(tasks) if self.chosen.among_all else tasks
        known = self.chosen.filled(logits, latest, -math.inf)
        return loss_of(self.feed.recipe, known, self.chosen.labels(labels, tasks))

    @torch.no_grad()
    def _offer(self, draw: Draws, logits: Tensor) -> None:
        """Vitter's reservoir sampling: the n-th sample draws one of n places, and enters the
        reservoir if that is one of its slots. The first samples fill the slots in order."""
        in_batch = torch.arange(len(logits), device=logits.device)
        number = self.seen + in_batch
        place = torch.where(number < self.held, number, (draw["chances"] * (number + 1)).long())
        # Outside of the reservoir, or replaced by a later sample of the batch.
        lost = (place >= self.held) | (place[:, None] == place).triu(1).any(1)
        # These are written to the spare room, because shapes must not depend on values.
        place = torch.where(lost, self.held + in_batch, place)
        self.memory_rows.index_copy_(0, place, draw["rows"])
        self.memory_logits.index_copy_(0, place, logits)
        self.seen.add_(len(logits))

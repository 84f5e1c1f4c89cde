"""iCaRL, incremental classifier and representation learning (Rebuffi et al., CVPR 2017), with a
head for each task.

The network learns from the task's data and a few exemplars of each earlier class, with a
distillation term that keeps the logits z of earlier heads near those z* of the network before the
task:

    ℓ(f_t(x), y) + strength · Σ_k BCE(z_k, σ(z*_k))

Exemplars are chosen so that their mean is near that of their class (herding). A sample is assigned
to the class whose exemplars have the nearest mean feature:

    argmin_c ‖φ(x) − μ_c‖
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rankup.data.tasks import Task
from rankup.errors import RankupError
from rankup.growing.copying import copy_of
from rankup.layers import active
from rankup.methods.base import Setting
from rankup.methods.options import IcarlOptions
from rankup.methods.shared.dense import DenseMethod
from rankup.methods.shared.heads import FEATURES, LearningHeads
from rankup.methods.shared.layout import Layouts
from rankup.methods.shared.replay import (
    MemorySlots,
    ReplayLearner,
    check_inputs,
    joined,
    memory_layout,
    remembered,
    rows_by_class,
)
from rankup.training.batches import Draws, Feed, as_floats, as_inputs
from rankup.training.engine.learner import Learner
from rankup.training.engine.module import loss_of

_CHUNK = 1024  # samples whose features are computed at once


def herded(features: Tensor, count: int) -> Tensor:
    """The indices of up to `count` rows of `features [N, D]`, chosen greedily: each brings the mean
    of the rows chosen so far as near as possible to the mean of all.

    >>> herded(torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]]), 2)
    tensor([1, 2])
    """
    features = features.double()
    mean = features.mean(0)
    squares = features.square().sum(1)
    total, chosen = torch.zeros_like(mean), []
    for number in range(1, min(count, len(features)) + 1):
        # ‖mean − (total + f)/n‖² is least where ‖f‖² − 2⟨n·mean − total, f⟩ is.
        costs = squares - 2 * (features @ (number * mean - total))
        best = costs.argmin(0, keepdim=True)  # [1]: indexing by a number would wait for a GPU
        chosen.append(best)
        total = total + features.index_select(0, best).squeeze(0)
        squares = squares.index_fill(0, best, math.inf)
    return torch.cat(chosen)


class Lists:
    """The task and class of each slot of a memory that is made of lists of exemplars, one list for
    each class of each task, followed by free slots.

    Args:
        lengths: the length of each class's list, by task.
        room: the number of slots.
    """

    def __init__(self, lengths: Sequence[Sequence[int]], room: int) -> None:
        flat = torch.tensor([length for task in lengths for length in task], dtype=torch.long)
        owners = [
            (index, label) for index, task in enumerate(lengths) for label in range(len(task))
        ]
        places = torch.tensor(owners, dtype=torch.long).view(-1, 2).repeat_interleave(flat, 0)
        self.tasks, self.labels = F.pad(places, (0, 0, 0, room - len(places))).unbind(1)


class ICaRLLearner(ReplayLearner):
    """Adds to the loss of every sample under its own task's head a distillation term for all
    earlier heads, from a copy of the network as it was when the task began.

    The copy is in eval mode, but its batch norms use batch statistics, as those of the learning
    network do, so that the term starts at its minimum.

    Args:
        seen: how many training samples all earlier tasks had.

    Attributes:
        weights: `[ΣC]`, the weight of each logit in the term; 0 for heads that are not distilled.
    """

    weights: Tensor
    old: nn.Module

    def __init__(
        self,
        body: nn.Module,
        head: LearningHeads,
        feed: Feed,
        index: int,
        slots: MemorySlots,
        images: Tensor,
        seen: int,
        options: IcarlOptions,
    ) -> None:
        # Enough exemplars per step to see each about once per epoch. From the budget, not from the
        # lists: their rounded lengths would give many tasks a captured graph of their own.
        most = min(options.budget, seen)
        replay = math.ceil(feed.batch_size * most / len(feed))
        super().__init__(body, feed, index, slots, images, replay)
        self._head = head.spec.name
        if not self.held:
            return
        old = copy_of(body).requires_grad_(False).eval()
        for norm in old.modules():
            if isinstance(norm, _BatchNorm):
                norm.running_mean = norm.running_var = norm.num_batches_tracked = None
        # A sum over a head's logits and a mean over heads, so that the weight of the term does not
        # grow with the number of tasks.
        weights = torch.zeros(len(head.weight), dtype=feed.dtype, device=feed.device)
        weights[: head.slices[index].start] = options.strength / index
        self.register_input("weights", weights)
        self.register_input("old", old)

    def forward(self, draw: Draws) -> Tensor:
        if not self.held:
            return super().forward(draw)
        batch = joined(self.current(draw), self.replayed(draw))
        with self._autocast():
            answers = self._answers(self.body, batch.x)
            logits = self._heads(self.body).own(answers, batch.tasks)
            loss = loss_of(self.feed.recipe, logits, batch.y)
            before = self._answers(self.old, batch.x)
        return loss + self.distillation(answers, before)

    def distillation(self, answers: Tensor, before: Tensor) -> Tensor:
        """The weighted cross-entropy between logits `[B, ΣC]` of all heads and those of before."""
        answers, wanted = answers.to(self.feed.dtype), before.to(self.feed.dtype).sigmoid()
        apart = F.binary_cross_entropy_with_logits(answers, wanted, reduction="none")
        return (apart * self.weights).sum(1).mean()

    def _answers(self, net: nn.Module, x: Tensor) -> Tensor:
        with active(FEATURES):
            return self._heads(net).all(net(x))

    def _heads(self, net: nn.Module) -> LearningHeads:
        # Not an attribute, or its tensors would be registered twice.
        return cast(LearningHeads, net.get_submodule(self._head))


class ICaRL(DenseMethod):
    """Learned tasks answer by the nearest mean of exemplars, the open one by its head. Features are
    normalised to length 1.

    `buffer` has a list of exemplars for each class, named `task/class`, in the order in which they
    were chosen: as more classes share the budget, lists are cut at the end.
    Norms are shared; batch norms see the task's batch and the exemplars as one.
    """

    heads = "learning"
    head: LearningHeads

    @classmethod
    def check(cls, setting: Setting) -> None:
        check_inputs("a memory", setting.tasks)
        classes = sum(task.classes for task in setting.tasks)
        if setting.options_of(IcarlOptions).budget < classes:
            raise RankupError(
                f"budget must be at least {classes}, one sample for each class of the stream, got "
                f"{setting.options_of(IcarlOptions).budget}"
            )

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.options = setting.options_of(IcarlOptions)
        self._means: dict[int, Tensor] = {}  # of learned tasks, cached until the network changes

    def begin(self, task: Task) -> Learner:
        self._means = {}
        return super().begin(task)

    def learner(self, feed: Feed) -> Learner:
        lists = [self._lists(task) for task in range(self.learned)]
        slots = Lists([[len(images) for images in task] for task in lists], self.options.budget)
        exemplars = [images for task in lists for images in task]
        images = torch.cat(exemplars) if exemplars else feed.task.train_x[:0]
        seen = sum(len(task.train_y) for task in self.setting.tasks[: self.learned])
        return ICaRLLearner(
            self.body, self.head, feed, self.learned, slots, images, seen, self.options
        )

    def consolidate(self, feed: Feed) -> None:
        """Choose the exemplars of the open task, and shorten the lists of earlier ones."""
        count = self.options.budget // self.head.slices[self.learned].stop
        features = torch.cat([self.features(x) for x, _ in feed.train(len(feed))])
        rows = rows_by_class(feed, torch.arange(len(feed), device=feed.device))
        self.buffer = {name: images[:count].clone() for name, images in self.buffer.items()}
        for label, of_class in enumerate(rows):
            chosen = of_class[herded(features[of_class], count)]
            self.buffer[f"{self.learned}/{label}"] = remembered(feed, chosen)

    def kept_layouts(self, learned: int) -> Layouts:
        if not learned:
            return {}
        most = self.options.budget // self.head.slices[learned - 1].stop
        layouts: Layouts = {}
        for index, task in enumerate(self.setting.tasks[:learned]):
            names = [f"buffer/{index}/{label}" for label in range(task.classes)]
            layouts |= dict.fromkeys(names, memory_layout([task], range(1, most + 1)))
        return layouts

    def predict(self, x: Tensor, task: int) -> Tensor:
        if task >= self.learned:
            return super().predict(x, task)
        return -torch.cdist(
            self.features(x), self.means(task), compute_mode="donot_use_mm_for_euclid_dist"
        )

    def means(self, task: int) -> Tensor:
        """`[C, D]`: for each class of a learned task the mean feature of its exemplars."""
        if task in self._means:
            return self._means[task]
        means = torch.stack([self._mean(images) for images in self._lists(task)])
        if self._feed is None:
            self._means[task] = means
        return means

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        """`[B, D]`: the inputs of the heads, normalised to length 1."""
        return F.normalize(super().predict(x, FEATURES))

    def _mean(self, images: Tensor) -> Tensor:
        dtype, parts = self.plan.dtype, torch.split(images, _CHUNK)
        inputs = (as_inputs(as_floats(chunk, dtype), self.recipe, dtype) for chunk in parts)
        return F.normalize(torch.cat([self.features(x) for x in inputs]).mean(0), dim=0)

    def _lists(self, task: int) -> list[Tensor]:
        classes = self.head.slices[task]
        return [self.buffer[f"{task}/{label}"] for label in range(classes.stop - classes.start)]

"""All tasks at once: not continual learning, but what one network could reach if it were not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from rankup.data.tasks import Task
from rankup.data.transforms import Augmentation, augment, to_float, transform_each
from rankup.errors import RankupError
from rankup.feed import Draws, Feed, take
from rankup.layers import TaskLayer, active
from rankup.learner import ModuleLearner, loss_of
from rankup.methods.base import Setting
from rankup.methods.dense import DenseMethod
from rankup.methods.heads import LearningHeads
from rankup.methods.options import MultitaskOptions
from rankup.plan import Plan
from rankup.recipe import Recipe
from rankup.specs import HeadSpec, LayerSpec
from rankup.steps import Learner


class Multitask(DenseMethod):
    """One network and a head per task, or with `single_head` one head over all their classes. All
    that is not a head is shared, norms included, which see batches of all tasks. The first task
    that comes brings all the others with it; an epoch is a pass over all tasks' data."""

    heads = "learning"

    def __init__(self, setting: Setting) -> None:
        assert isinstance(setting.options, MultitaskOptions)
        self.single_head = setting.options.single_head
        super().__init__(setting)

    def feed(self, task: Task) -> Feed:
        return Union(self.setting.tasks, self.recipe, self.device, self.single_head)

    def learner(self, feed: Feed) -> Learner:
        return MultitaskLearner(self.body, feed, self.learned)

    def end(self) -> None:
        super().end()
        while self.learned < len(self.setting.tasks):
            self._append([part.learned() for part in self.parts])

    def _own(self, spec: LayerSpec, plan: Plan) -> TaskLayer | None:
        if not (self.single_head and isinstance(spec, HeadSpec)):
            return super()._own(spec, plan)
        classes = [task.classes for task in self.setting.tasks]
        return SingleHead(spec, classes, self.seed, plan.dtype, plan.device)


class SingleHead(LearningHeads):
    """One head over the classes of all tasks: its answers are all logits for a mixed batch, and for
    a task its own and one more, the largest of all others. Whoever takes the largest of these is
    right only where the right class is the largest of all."""

    def forward(self, x: Tensor) -> Tensor:
        logits, task = F.linear(x, self.weight, self.bias), self._task(x)
        if isinstance(task, Tensor):
            return logits
        own = self.slices[task]
        others = torch.cat([logits[..., : own.start], logits[..., own.stop :]], -1)
        largest = [others.amax(-1, keepdim=True)] if others.shape[-1] else []
        return torch.cat([logits[..., own], *largest], -1)


class MultitaskLearner(ModuleLearner):
    def __init__(self, body: torch.nn.Module, feed: Feed, index: int) -> None:
        super().__init__(body, feed, index)
        self.replicas = "branches"  # each feed has transforms of its own

    def forward(self, draw: Draws) -> Tensor:
        with active(draw["tasks"]), self._autocast():
            return loss_of(self.feed.recipe, self.logits(draw), draw["labels"])


class Part(Feed):
    """One task of several, which is never made as a whole: all of them would take much memory."""

    @property
    def made(self) -> None:
        return None


class Union(Feed):
    """The data of several tasks as if it were one's. Images that tasks share are held once, and
    transformed when they are gathered.

    Args:
        one_label: whether a class has a label of its own among those of all tasks, or as in its
            task.
    """

    made = None

    def __init__(
        self, tasks: Sequence[Task], recipe: Recipe, device: torch.device, one_label: bool
    ) -> None:
        there: dict[Tensor, Tensor] = {}
        here = [t if t.train_x.device == device else t.moved(device, there) for t in tasks]
        for task in here:
            for what in ("shape", "dtype"):
                first, own = (getattr(t.train_x[0], what) for t in (here[0], task))
                if own != first:
                    raise RankupError(
                        f"tasks that are learned at once need inputs of one {what}, got {first} "
                        f"in {here[0].name!r} and {own} in {task.name!r}"
                    )
        self._parts = [Part(task, recipe, device) for task in here]
        self._one_label = one_label
        # Of every sample of every task: where its image is, its label and its task.
        distinct = {id(task.train_x): task.train_x for task in here}
        sizes = [0, *(len(x) for x in distinct.values())]
        starts = dict(zip(distinct, accumulate(sizes), strict=False))
        self._x = torch.cat(list(distinct.values())) if len(distinct) > 1 else here[0].train_x
        self._rows = torch.cat(
            [starts[id(t.train_x)] + torch.arange(len(t.train_y), device=device) for t in here]
        )
        firsts = accumulate([0, *(task.classes for task in here)]) if one_label else [0] * len(here)
        self._labels = torch.cat(
            [task.train_y + first for task, first in zip(here, firsts, strict=False)]
        )
        lengths = torch.tensor([len(task.train_y) for task in here], device=device)
        self._tasks = torch.arange(len(here), device=device).repeat_interleave(lengths)
        self._transform = transform_each([t.transform for t in here], to_float(self._x[:1]))
        whole = replace(here[0], name=f"all {len(here)} tasks", transform=None)
        super().__init__(whole, recipe, device)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def x(self) -> Tensor:
        return self._x

    @property
    def parts(self) -> Sequence[Feed]:
        return self._parts

    def guess(self) -> float:
        shares = [part.guess() for part in self.parts]
        return (max(shares) if self._one_label else sum(shares)) / len(shares)

    def draws(self, generator: torch.Generator) -> Draws:
        drawn = super().draws(generator)
        rows = drawn["rows"]
        places = {
            "rows": self._rows[rows],
            "labels": self._labels[rows],
            "tasks": self._tasks[rows],
        }
        return drawn | places

    def batch(self, x: Tensor, draw: Draws, at: Tensor | None = None) -> Tensor:
        picked = to_float(take(x, draw["rows"]))
        if "coins" in draw:
            drawn = Augmentation(draw["coins"], draw["offsets"])
            picked = augment(picked, self.recipe.crop, drawn)
        if self._transform is not None:
            picked = self._transform(picked, draw["tasks"])
        return self.scaled(picked)

"""Multi-task learning: one network is trained on the data of all tasks at once,

    min_θ Σ_t Σ_{(x, y) ∈ D_t} ℓ(f_t(x; θ), y).

It is not continual learning, but a bound on what one network of this size could reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rankup.data.tasks import Task
from rankup.data.transforms import Augmentation, augment, to_float, transform_each
from rankup.growing.plan import Plan
from rankup.layers import Start, TaskLayer, Tensors, active
from rankup.layers.spec import HeadSpec, LayerSpec
from rankup.methods.base import Setting
from rankup.methods.options import MultitaskOptions
from rankup.methods.shared.dense import DenseMethod
from rankup.methods.shared.heads import LearningHeads
from rankup.methods.shared.layout import Layouts
from rankup.methods.shared.replay import check_inputs
from rankup.training.batches import Draws, Feed, in_equal_parts, take
from rankup.training.engine.learner import Learner
from rankup.training.engine.module import ModuleLearner, loss_of
from rankup.training.recipe import Recipe
from rankup.utils.signals import undisturbed


class Multitask(DenseMethod):
    """One network with a head per task. All tasks are learned when the first one begins, and an
    epoch is a pass over the data of all of them. Everything but the heads is shared, including
    norms, whose batches mix tasks.

    With `single_head` there is one head over the classes of all tasks, which count as distinct
    even if tasks have the same ones, such as permutations of MNIST. An answer is right only if it
    is the right class among all.
    """

    heads = "learning"
    learns_all_at_once = True

    @classmethod
    def check(cls, setting: Setting) -> None:
        check_inputs("multitask", setting.tasks)

    def __init__(self, setting: Setting) -> None:
        self.single_head = setting.options_of(MultitaskOptions).single_head
        super().__init__(setting)

    def feed(self, task: Task) -> Feed:
        device, dtype = self.device, self.plan.dtype
        return Union(self.setting.tasks, self.recipe, device, dtype, self.single_head)

    def learner(self, feed: Feed) -> Learner:
        return MultitaskLearner(self.body, feed, self.learned)

    def end(self) -> None:
        with undisturbed():  # it cannot resume with some of the tasks but not the others
            super().end()
            while self.learned < len(self.setting.tasks):
                self._append([layer.learned() for layer in self.parts])

    def kept_layouts(self, learned: int) -> Layouts:
        if learned not in (0, len(self.setting.tasks)):
            raise ValueError(
                f"it holds {learned} tasks, but all {len(self.setting.tasks)} are learned at once"
            )
        return {}

    def _task_layer(self, spec: LayerSpec, plan: Plan) -> TaskLayer | None:
        if not isinstance(spec, HeadSpec):
            return super()._task_layer(spec, plan)
        classes = [task.classes for task in self.setting.tasks]
        kind = SingleHead if self.single_head else AllHeads
        return kind(spec, classes, self.seed, plan.dtype, plan.device)


class AllHeads(LearningHeads):
    """A head per task, all of which start with the first task."""

    def open(self, values: Tensors, start: Start | None = None) -> None:
        for task, classes in enumerate(self.slices):
            self.count = task  # determines what is drawn and where it goes
            super().open(self.start(classes.stop - classes.start, Start()))
        self.count = 0


class SingleHead(AllHeads):
    """One head over the classes of all tasks. For a mixed batch it returns all logits; for a task
    its own logits and one more, the largest of all others, so that their argmax is right only
    where the right class has the largest logit of all."""

    def forward(self, x: Tensor) -> Tensor:
        logits, task = self.all(x), self._task(x)
        if isinstance(task, Tensor):
            return logits
        classes = self.slices[task]
        others = torch.cat([logits[..., : classes.start], logits[..., classes.stop :]], -1)
        largest = [others.amax(-1, keepdim=True)] if others.shape[-1] else []
        return torch.cat([logits[..., classes], *largest], -1)


class MultitaskLearner(ModuleLearner):
    """Learns from batches that mix tasks, each sample under its task's or the single head."""

    def __init__(self, body: torch.nn.Module, feed: Feed, index: int) -> None:
        super().__init__(body, feed, index)
        self.replicas = "branches"  # each feed has transforms of its own

    def forward(self, draw: Draws) -> Tensor:
        with active(draw["tasks"]), self._autocast():
            return loss_of(self.feed.recipe, self.logits(draw), draw["labels"])


class Part(Feed):
    """The data of one of the tasks. `fixed` is None, because prepared inputs of all tasks together
    would take too much memory."""

    fixed = None


class Union(Feed):
    """The data of several tasks, as that of a single one. Images that tasks share are stored once,
    and each task's transform is applied when a batch is gathered.

    Args:
        one_label: whether classes are numbered across all tasks; otherwise from 0 in each.
    """

    fixed = None

    def __init__(
        self,
        tasks: Sequence[Task],
        recipe: Recipe,
        device: torch.device,
        dtype: torch.dtype,
        one_label: bool,
    ) -> None:
        moved: dict[Tensor, Tensor] = {}  # so that tensors that tasks share are copied once
        here = [t if t.train_x.device == device else t.moved(device, moved) for t in tasks]
        self._parts = [Part(task, recipe, device, dtype) for task in here]
        self._one_label = one_label
        images: dict[int, Tensor] = {}
        starts: dict[int, int] = {}
        tables = []
        for number, task in enumerate(here):
            key = id(task.train_x)
            if key not in images:
                starts[key] = sum(map(len, images.values()))
                images[key] = task.train_x
            rows = starts[key] + torch.arange(len(task.train_y), device=device)
            labels = task.train_y + (sum(t.classes for t in here[:number]) if one_label else 0)
            tables.append(torch.stack([rows, labels, torch.full_like(rows, number)]))
        self._samples = torch.cat(tables, 1)  # [3, N]: each sample's row in images, label and task
        self._images = torch.cat([*images.values()]) if len(images) > 1 else here[0].train_x
        self._transform = transform_each([t.transform for t in here], to_float(self._images[:1]))
        whole = replace(here[0], name=f"all {len(here)} tasks", transform=None)
        super().__init__(whole, recipe, device, dtype)

    def __len__(self) -> int:
        return self._samples.shape[1]

    @property
    def x(self) -> Tensor:
        return self._images

    @property
    def parts(self) -> Sequence[Feed]:
        return self._parts

    def guess(self) -> float:
        shares = [feed.guess() for feed in self.parts]
        return (max(shares) if self._one_label else sum(shares)) / len(shares)

    def sample_epoch(self, generator: torch.Generator) -> Draws:
        drawn = super().sample_epoch(generator)
        rows, labels, tasks = self._samples[:, drawn["rows"]]
        return drawn | {"rows": rows, "labels": labels, "tasks": tasks}

    def sample(self, most: int, generator: torch.Generator) -> Iterator[Tensor]:
        order = torch.randperm(len(self), generator=generator)[:most].to(self.device)
        for chunk in in_equal_parts(order, self.chunk_size(self.x)):
            rows, _, tasks = self._samples[:, chunk]
            yield self.batch(self.x, {"rows": rows, "tasks": tasks})

    def batch(self, x: Tensor, draw: Draws, at: Tensor | None = None) -> Tensor:
        picked = self.floats(take(x, draw["rows"]))
        if "coins" in draw:
            drawn = Augmentation(draw["coins"], draw["offsets"])
            picked = augment(picked, self.recipe.crop, drawn)
        if self._transform is not None:
            picked = self._transform(picked, draw["tasks"])
        return self.scaled(picked)

"""Heads of all tasks that keep learning, for methods that replay samples of earlier tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankup.layers import Selection, Start, TaskLayer, Tensors
from rankup.layers.spec import HeadSpec
from rankup.layers.tensors import over_last

FEATURES = -1  # as the active task: heads return their inputs


class LearningHeads(TaskLayer):
    """A Linear head per task, all of which are parameters from the beginning, so that shapes stay
    the same when tasks are added. Heads of later tasks are zero and get no gradient; a task's head
    is initialised like a `TaskHead`.

    Attributes:
        weight: `[ΣC, in]`, the heads of all tasks, one after another.
        bias: `[ΣC]`.
        slices: the rows of each task.
        columns: `[T, widest]`, the indices of each task's logits among all; 0 where it has fewer.
        missing: `[T, widest]`, where that is so.
        alike: whether all tasks have the same number of classes.
    """

    spec: HeadSpec
    weight: Tensor
    bias: Tensor | None
    columns: Tensor
    missing: Tensor

    def __init__(
        self,
        spec: HeadSpec,
        classes: Sequence[int],
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(spec, seed, dtype, device)
        self.slices = [slice(*ends) for ends in pairwise(accumulate(classes, initial=0))]
        total, widest = sum(classes), max(classes)
        self.weight = nn.Parameter(torch.zeros(total, spec.inputs, **self._factory))
        self.bias = nn.Parameter(torch.zeros(total, **self._factory)) if spec.bias else None
        starts = torch.tensor([rows.start for rows in self.slices], device=device)[:, None]
        places = torch.arange(widest, device=device)
        missing = places >= torch.tensor(classes, device=device)[:, None]
        columns = (starts + places).masked_fill(missing, 0)
        self.register_buffer("columns", columns, persistent=False)
        self.register_buffer("missing", missing, persistent=False)
        self.alike = total == widest * len(classes)

    def forward(self, x: Tensor) -> Tensor:
        task = self._task(x)
        if isinstance(task, Tensor):
            return self.own(self.all(x), task)
        if task == FEATURES:
            return x
        classes = self.slices[task]
        return F.linear(x, self.weight[classes], None if self.bias is None else self.bias[classes])

    def all(self, x: Tensor) -> Tensor:
        """`[…, ΣC]`: the logits of all heads, one after another."""
        return F.linear(x, self.weight, self.bias)

    def own(self, answers: Tensor, tasks: Tensor) -> Tensor:
        """`[…, widest]`: the logits of each sample's own task, `tasks [B]`, picked from those of
        all heads; −∞ where that head has fewer classes than the widest."""
        # Every logit is picked at most once, so that gradients on a GPU are deterministic; those of
        # indexed rows of the weights are not.
        columns = over_last(self.columns.index_select(0, tasks), answers)
        logits = answers.gather(-1, columns.expand(*answers.shape[:-1], -1))
        if self.alike:
            return logits
        missing = over_last(self.missing.index_select(0, tasks), answers)
        return logits.masked_fill(missing, -math.inf)

    def start(self, classes: int, start: Start) -> Tensors:
        return self._head_start(classes, self.spec)

    def open(self, values: Tensors, start: Start | None = None) -> None:
        self._put(values)

    def learned(self) -> Tensors:
        return self.added(self.count)

    def close(self) -> None:
        """Do nothing: all heads stay open."""

    def extended(self, *added: Tensors, selections: Sequence[Selection] = (None,)) -> Tensors:
        (tensors,) = added  # methods commit their tasks one at a time
        return tensors

    def install(self, tables: Tensors, selections: Sequence[Selection] = (None,)) -> None:
        self._put(tables)
        self.count += len(selections)

    def added(self, task: int) -> Tensors:
        return {key: p.detach()[self.slices[task]] for key, p in self.named_parameters()}

    def _put(self, values: Tensors) -> None:
        classes = self.slices[self.count]
        with torch.no_grad():
            for key, value in values.items():
                self.get_parameter(key)[classes] = value

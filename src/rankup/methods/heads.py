"""Heads of all tasks that go on learning, for methods that replay samples of old tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankup.layers import Start, TaskLayer, Tensors
from rankup.layers.base import over_last
from rankup.layers.head import Heads, together
from rankup.specs import HeadSpec


class LearningHeads(TaskLayer):
    """A full output layer per task, all of them parameters from the beginning, those of tasks to
    come included: they get no gradient, and shapes stay the same as tasks come in."""

    spec: HeadSpec
    weight: Tensor
    bias: Tensor | None
    rows: Tensor

    def __init__(
        self,
        spec: HeadSpec,
        classes: Sequence[int],
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(spec, seed, dtype, device)
        ends = torch.tensor([0, *classes]).cumsum(0).tolist()
        self.slices = [slice(a, b) for a, b in pairwise(ends)]
        self.weight = nn.Parameter(torch.cat([self._start(number) for number in classes]))
        self.bias = nn.Parameter(torch.zeros(ends[-1], **self._factory)) if spec.bias else None
        self.count = 0
        rows = torch.full((len(classes), max(classes)), -1, device=device)
        for own, places in zip(rows, self.slices, strict=True):
            own[: places.stop - places.start] = torch.arange(places.start, places.stop)
        self.register_buffer("rows", rows, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        task = self._task(x)
        if not isinstance(task, Tensor):
            own = self.slices[task]
            return F.linear(x, self.weight[own], None if self.bias is None else self.bias[own])
        heads = Heads(self.weight, self.bias, self.rows)
        logits = together(x, task, heads)
        if heads.alike:
            return logits
        missing = (self.rows < 0).index_select(0, task)
        return logits.masked_fill(over_last(missing, x), -math.inf)

    def start(self, classes: int, start: Start) -> Tensors:
        return {}

    def learned(self) -> Tensors:
        return {key: tensor.clone() for key, tensor in self.added(self.count).items()}

    def close(self) -> None:
        """All stay open."""

    def extended(self, added: Tensors) -> Tensors:
        return added

    def install(self, tables: Tensors) -> None:
        own = self.slices[self.count]
        with torch.no_grad():
            for key, value in tables.items():
                self.get_parameter(key)[own] = value
        self.count += 1

    def added(self, task: int) -> Tensors:
        return {key: p.detach()[self.slices[task]] for key, p in self.named_parameters()}

    def plain(self, task: int) -> nn.Module:
        raise NotImplementedError  # networks are merged, methods are not

    def _start(self, classes: int) -> Tensor:
        drawn = self._orthogonal(classes, self.spec.inputs, "head")
        self.count += 1  # what is drawn depends on it
        return drawn

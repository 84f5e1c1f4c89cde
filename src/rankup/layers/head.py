"""An output layer per task."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankup.layers.base import Start, TaskLayer, Tensors, over_last
from rankup.specs import HeadSpec


class TaskHead(TaskLayer):
    """A full output layer per task, each with its own number of classes.

    Tables: `weights [ΣC, in]` and `biases [ΣC]`, one task's classes after another's; a task's rows
    stay where they are, and so does their alignment. `rows [T, widest]` says which they are, −1
    where a task has fewer classes than the widest.
    """

    spec: HeadSpec
    weights: Tensor
    biases: Tensor | None
    rows: Tensor
    new_weight: Tensor
    new_bias: Tensor | None

    def __init__(self, spec: HeadSpec, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, seed, dtype, device)
        self.register_buffer("weights", torch.empty(0, spec.inputs, **self._factory))
        self.register_buffer("biases", torch.empty(0, **self._factory) if spec.bias else None)
        self.register_buffer("rows", torch.empty(0, 0, dtype=torch.long, device=device))
        self.ends = [0]  # where each task's classes end

    @property
    def in_features(self) -> int:
        return self.spec.inputs

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            self._refuse_shape(x, f"{self.in_features} features in the last dimension")
        task = self._task(x)
        if isinstance(task, Tensor):
            return self._mixed(x, task)
        if task < self.count:
            return F.linear(x, *self._own(task))
        return F.linear(x, self.new_weight, self.new_bias if self.spec.bias else None)

    def start(self, classes: int, start: Start) -> Tensors:
        values = {"weight": self._orthogonal(classes, self.spec.inputs, "head")}
        if self.spec.bias:
            values["bias"] = torch.zeros(classes, **self._factory)
        return values

    def extended(self, added: Tensors) -> Tensors:
        classes, end = len(added["weight"]), self.ends[self.count]
        tables = {"weights": torch.cat([self.weights, added["weight"]])}
        if self.biases is not None:
            tables["biases"] = torch.cat([self.biases, added["bias"]])
        widest = max(classes, self.rows.shape[1])
        own = torch.arange(end, end + classes, device=self.rows.device)
        old = F.pad(self.rows, (0, widest - self.rows.shape[1]), value=-1)
        new = F.pad(own, (0, widest - classes), value=-1)
        return tables | {"rows": torch.cat([old, new[None]])}

    def install(self, tables: Tensors) -> None:
        self.ends.append(len(tables["weights"]))
        super().install(tables)

    def added(self, task: int) -> Tensors:
        weight, bias = self._own(task)
        return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}

    def plain(self, task: int) -> nn.Module:
        weight, bias = self._own(task)
        linear = nn.Linear(self.in_features, len(weight), bias is not None, device="meta")
        linear.weight = nn.Parameter(weight.clone())
        if bias is not None:
            linear.bias = nn.Parameter(bias.clone())
        return linear

    def _own(self, task: int) -> tuple[Tensor, Tensor | None]:
        own = slice(self.ends[task], self.ends[task + 1])
        return self.weights[own], None if self.biases is None else self.biases[own]

    def _mixed(self, x: Tensor, tasks: Tensor) -> Tensor:
        rows = self.rows[tasks]  # [B, widest]
        there = rows.clamp(min=0)
        logits = torch.einsum("b...f,bcf->b...c", x, self.weights[there])
        if self.biases is not None:
            logits = logits + over_last(self.biases[there], x)
        return logits.masked_fill(over_last(rows < 0, x), -math.inf)

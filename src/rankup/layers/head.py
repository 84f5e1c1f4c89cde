"""The output layer of every task."""

import math
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankup.layers.base import Start, TaskLayer, Tensors, over_last
from rankup.layers.dispatch import heads_way
from rankup.layers.head_mixed import WAYS, Heads
from rankup.layers.spec import HeadSpec
from rankup.layers.task_context import active_task, answers_like_widest


class TaskHead(TaskLayer):
    """A full output layer per task, each with its own number of classes.

    Tables: `weights [ΣC, in]` and `biases [ΣC]`, one task's classes after another's; a task's rows
    stay where they are, and so does their alignment. `rows [T, widest]` holds their indices, −1
    where a task has fewer classes than the widest.
    """

    spec: HeadSpec
    weights: Tensor
    biases: Tensor | None
    rows: Tensor
    new_weight: Tensor
    new_bias: Tensor

    def __init__(self, spec: HeadSpec, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, seed, dtype, device)
        self.register_buffer("weights", torch.empty(0, spec.inputs, **self._factory))
        self.register_buffer("biases", torch.empty(0, **self._factory) if spec.bias else None)
        self.register_buffer("rows", torch.empty(0, 0, dtype=torch.long, device=device))
        self.ends = [0]  # where each task's classes end

    @property
    def in_features(self) -> int:
        return self.spec.inputs

    @property
    def out_features(self) -> int:
        """How many answers the head gives: the classes of the active task, or in a mixed
        batch those of the task with the most."""
        if isinstance(active_task(), Tensor) or answers_like_widest():
            return self.rows.shape[1]
        return len(self._of_task(self._task_read("number of classes"))[0])

    @property
    def weight(self) -> Tensor:
        """The weight of the active task, for a module's forward to read."""
        shape = self.out_features, self.in_features
        return self._read_of_task("weight", shape, lambda task: self._of_task(task)[0])

    @property
    def bias(self) -> Tensor | None:
        if not self.spec.bias:
            return None
        return self._read_of_task("bias", (self.out_features,), self._own_bias)

    def _own_bias(self, task: int) -> Tensor:
        _, bias = self._of_task(task)
        assert bias is not None
        return bias

    def extra_repr(self) -> str:
        return f"in={self.spec.inputs}, bias={self.spec.bias}"

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[-1] != self.in_features:
            self._refuse_shape(input, f"{self.in_features} features in the last dimension")
        self._check_dtype(input)
        task = self._task(input)
        if isinstance(task, Tensor):
            return self._mixed(input, task)
        y = F.linear(input, *self._of_task(task))
        if answers_like_widest():
            return F.pad(y, (0, self.rows.shape[1] - y.shape[-1]), value=-math.inf)
        return y

    def start(self, classes: int, start: Start) -> Tensors:
        return self._head_start(classes, self.spec)

    def extended(self, *added: Tensors) -> Tensors:
        tables = {"weights": torch.cat([self.weights, *(tensors["weight"] for tensors in added)])}
        if self.biases is not None:
            tables["biases"] = torch.cat([self.biases, *(tensors["bias"] for tensors in added)])
        ends = [
            *accumulate(
                (len(tensors["weight"]) for tensors in added), initial=self.ends[self.count]
            )
        ]
        widest = max(self.rows.shape[1], *(end - start for start, end in pairwise(ends)))
        rows = [self.rows]
        for start, end in pairwise(ends):
            rows.append(torch.arange(start, end, device=self.rows.device)[None])
        padded = [F.pad(row, (0, widest - row.shape[1]), value=-1) for row in rows]
        return tables | {"rows": torch.cat(padded)}

    def install(self, tables: Tensors, tasks: int = 1) -> None:
        self.ends = _ends(tables["rows"])
        super().install(tables, tasks)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.ends = _ends(self.rows)

    def added(self, task: int) -> Tensors:
        weight, bias = self._of_task(task)
        return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}

    def merged(self, task: int) -> nn.Module:
        weight, bias = self._of_task(task)
        linear = nn.Linear(self.in_features, len(weight), bias is not None, device="meta")
        linear.weight = nn.Parameter(weight.clone())
        if bias is not None:
            linear.bias = nn.Parameter(bias.clone())
        return linear

    def _of_task(self, task: int) -> tuple[Tensor, Tensor | None]:
        if task >= self.count:
            return self.new_weight, self.new_bias if self.spec.bias else None
        rows = slice(self.ends[task], self.ends[task + 1])
        return self.weights[rows], None if self.biases is None else self.biases[rows]

    def _mixed(self, x: Tensor, tasks: Tensor) -> Tensor:
        buffers: dict[str, Any] = self._buffers
        heads = Heads(buffers["weights"], buffers["biases"], buffers["rows"])
        logits = WAYS[heads_way(heads.shape(x), x.device.type)](x, tasks, heads)
        if heads.alike:
            return logits
        missing = (heads.rows < 0).index_select(0, tasks)
        return logits.masked_fill(over_last(missing, x), -math.inf)


def _ends(rows: Tensor) -> list[int]:
    """Where each task's classes end, starting with a 0."""
    return [0, *(rows >= 0).sum(1).cumsum(0).tolist()]

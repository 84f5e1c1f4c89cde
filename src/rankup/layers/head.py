"""The output layer of every task."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankup.layers.base import Start, TaskLayer
from rankup.layers.dispatch import heads_way
from rankup.layers.head_mixed import WAYS, Heads
from rankup.layers.spec import HeadSpec
from rankup.layers.tables import Selection, aligned_rows, cut_out
from rankup.layers.task_context import active_task, answers_like_widest, note_head_input
from rankup.layers.tensors import Tensors, over_last


class TaskHead(TaskLayer):
    """An output layer per task, each with its own number of classes: a Linear, or a convolution
    that applies one at every position.

    Attributes:
        weights: `[ΣC, in]`, the classes of one task after those of another.
        biases: `[ΣC]`, likewise.
        rows: `[T, widest]`, the rows of each task's classes in `weights`, −1 where a task has
            fewer classes than the widest.
        in_place: whether weights are read from the table without copying them to an aligned
            address, as in networks of the first format version. Their bits then depend on where
            they are in the table, so no earlier task may be removed.
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
        self.in_place = False

    @property
    def in_features(self) -> int:
        return self.spec.inputs

    in_channels = in_features  # of a 1×1 convolution

    @property
    def out_features(self) -> int:
        """The number of logits: the active task's classes, or in a mixed batch those of the task
        with the most."""
        if isinstance(active_task(), Tensor) or answers_like_widest():
            return self.rows.shape[1]
        return len(self._of_task(self._task_read("number of classes"))[0])

    @property
    def weight(self) -> Tensor:
        """The weight of the active task, for a module's forward to read."""
        shape = self.out_features, *self._inputs
        return self._read_of_task(
            "weight", shape, lambda task: self._as_torchs(task).to(self.computes_in)
        )

    @property
    def _inputs(self) -> tuple[int, ...]:
        """The shape of a weight without its first dimension, the classes."""
        taps = self.spec.taps
        return (self.spec.inputs // math.prod(taps), *taps)

    def _as_torchs(self, task: int) -> Tensor:
        return self._of_task(task)[0].view(-1, *self._inputs)

    @property
    def bias(self) -> Tensor | None:
        if not self.spec.bias:
            return None
        return self._read_of_task("bias", (self.out_features,), self._own_bias)

    def _own_bias(self, task: int) -> Tensor:
        _, bias = self._of_task(task)
        assert bias is not None
        return bias.to(self.computes_in)

    def extra_repr(self) -> str:
        return f"in={self.spec.inputs}, bias={self.spec.bias}"

    def forward(self, input: Tensor) -> Tensor:
        channels = -1 - len(self.spec.taps)  # the dimension of the input's channels
        if input.dim() < -channels or input.shape[channels] != self.in_features:
            where = "the last dimension" if channels == -1 else f"dimension {channels}"
            self._refuse_shape(input, f"{self.in_features} features in {where}")
        self._check_dtype(input)
        task = self._task(input)
        x = self._widened_input(input if channels == -1 else input.movedim(channels, -1))
        note_head_input(x)
        y = self._mixed(x, task) if isinstance(task, Tensor) else self._of_one_task(x, task)
        y = y.to(input.dtype) if x.dtype != input.dtype else y
        return y if channels == -1 else y.movedim(-1, channels)

    def _of_one_task(self, x: Tensor, task: int) -> Tensor:
        y = F.linear(x, *self._of_task(task))
        if answers_like_widest():
            return F.pad(y, (0, self.rows.shape[1] - y.shape[-1]), value=-math.inf)
        return y

    def start(self, classes: int, start: Start) -> Tensors:
        return self._head_start(classes, self.spec, start.key)

    def extended(self, *added: Tensors, selections: Sequence[Selection] = (None,)) -> Tensors:
        tables = {"weights": torch.cat([self.weights, *(tensors["weight"] for tensors in added)])}
        if self.biases is not None:
            tables["biases"] = torch.cat([self.biases, *(tensors["bias"] for tensors in added)])
        return tables | {"rows": self._rows([*self._classes, *(len(t["weight"]) for t in added)])}

    def install(self, tables: Tensors, selections: Sequence[Selection] = (None,)) -> None:
        self.ends = _ends(tables["rows"])
        super().install(tables, selections)

    def without(self, task: int) -> Tensors:
        start, end = self.ends[task : task + 2]
        tables = {"weights": self.weights, "biases": self.biases}
        cut = {k: cut_out(t, start, end) for k, t in tables.items() if t is not None}
        return cut | {"rows": self._rows([*self._classes[:task], *self._classes[task + 1 :]])}

    def drop(self, task: int, tables: Tensors) -> None:
        self.ends = _ends(tables["rows"])
        super().drop(task, tables)

    @property
    def _classes(self) -> list[int]:
        return [end - start for start, end in pairwise(self.ends)]

    def _rows(self, classes: Sequence[int]) -> Tensor:
        """The table `rows` for tasks of so many classes."""
        starts = torch.tensor([0, *accumulate(classes)], device=self.rows.device)[:-1, None]
        counts = torch.tensor([*classes], device=self.rows.device)[:, None]
        columns = torch.arange(max(classes, default=0), device=self.rows.device)
        return torch.where(columns < counts, starts + columns, -1)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.ends = _ends(self.rows)

    def added(self, task: int) -> Tensors:
        weight, bias = self._of_task(task)
        return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}

    def merged(self, task: int) -> nn.Module:
        weight, bias = self._as_torchs(task), self._of_task(task)[1]
        plain: nn.Module
        if taps := self.spec.taps:
            convolution: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(taps) - 1]
            channels = weight.shape[1], len(weight)
            plain = convolution(*channels, taps, bias=bias is not None, device="meta")
        else:
            plain = nn.Linear(self.in_features, len(weight), bias is not None, device="meta")
        plain.weight = nn.Parameter(weight.to(self.computes_in, copy=True))
        if bias is not None:
            plain.bias = nn.Parameter(bias.to(self.computes_in, copy=True))
        return plain

    def _of_task(self, task: int) -> tuple[Tensor, Tensor | None]:
        if not self._knows(task):
            return self.new_weight, self.new_bias if self.spec.bias else None
        start, end = self.ends[task : task + 2]
        bias = None if self.biases is None else self.biases[start:end]
        if self.in_place:
            return self.weights[start:end], bias
        return aligned_rows(self.weights, start, end), bias

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

"""Factored layers that are applied to inputs: Linears and convolutions."""

from abc import abstractmethod
from functools import reduce

import torch
from torch import Tensor

from rankup.errors import TaskStateError
from rankup.layers import merging
from rankup.layers.dispatch import (
    MixedShape,
    MixedWay,
    dense_is_cheaper,
    mixed_way,
    samples_to_plan,
)
from rankup.layers.factored import FactoredLayer
from rankup.layers.tables import (
    Block,
    Tables,
    read_tables,
)
from rankup.layers.task_context import LEARNING
from rankup.layers.tensors import working_dtype


class AppliedLayer(FactoredLayer):
    """A factored layer that a module calls with an input, for one task or for a mixed batch. The
    forms of the sum are written here; how a matrix is applied is for each kind of layer to say."""

    def forward(self, input: Tensor) -> Tensor:
        self._check(input)
        task = self._task(input)
        if isinstance(task, Tensor):
            return self._mixed(input, task)
        if self._knows(task):
            return self._of_one_task(input, task)
        if self._learns(task):
            return self._learning(input)
        raise TaskStateError(
            f"layer {self.spec.name!r} knows tasks 0 to {self.count - 1}, not {task}"
        )

    @property
    def weight(self) -> Tensor:
        """W of the active task, shaped as in torch's own layer: a module's forward may read its
        dtype, or more."""
        conv = self.spec.conv
        inputs = (conv.channels, *conv.kernel_size) if conv else (self.spec.inputs,)
        shape = self.spec.outputs, *inputs
        return self._read_of_task("weight", shape, lambda task: self._as_torchs(self.matrix(task)))

    def _as_torchs(self, matrix: Tensor) -> Tensor:
        return matrix

    @property
    def bias(self) -> Tensor | None:
        """The bias of the active task: a module's forward may check whether there is one."""
        if not self.spec.bias:
            return None
        shape = (self.spec.outputs,)
        return self._read_of_task("bias", shape, lambda task: self._bias(task).to(self.computes_in))

    def _mixed(self, x: Tensor, tasks: Tensor) -> Tensor:
        tables, way = self._tables(), self._mixed_way(x)
        # A convolution per sample has as many groups as there are samples: torch would compile it
        # again for every number.
        if way == "weights" and (self._pointwise or not torch.compiler.is_compiling()):
            return self._mixed_by_weights(x, tasks, tables)
        by = self._mixed_by_hidden if way == "hidden" else self._mixed_by_factors
        return by(x, tasks, tables)

    def _mixed_way(self, x: Tensor) -> MixedWay:
        (tasks, rank), samples = self.S.shape, samples_to_plan(x)
        positions = self._positions(x) // max(1, samples)
        matrix = self.spec.inputs, self.spec.outputs, self._pointwise
        return mixed_way(MixedShape(samples, positions, tasks, rank, *matrix), x.device.type)

    def _tables(self) -> Tables:
        U, V, S, *rest = read_tables(self._buffers)
        rank = S.shape[1]  # on a GPU, steps of a task being learned may have padded U and V
        return Tables(U[:rank], V[:rank], S, *rest)

    def _mixed_by_hidden(self, x: Tensor, tasks: Tensor, tables: Tables) -> Tensor:
        hidden = self._map(x, tables.V)
        hidden = hidden * self._per_sample(tables.S.index_select(0, tasks), x).to(hidden.dtype)
        y, start = self._up(hidden, tables.U), self._mixed_start(x, tasks, tables)
        return y if start is None else y + start.to(y.dtype)

    def _mixed_by_factors(self, x: Tensor, tasks: Tensor, tables: Tables) -> Tensor:
        scaled = _scaled(tables.U, tables.S.index_select(0, tasks)).to(working_dtype(x))
        return self._map_each(self._map(x, tables.V), scaled, self._mixed_start(x, tasks, tables))

    def _mixed_by_weights(self, x: Tensor, tasks: Tensor, tables: Tables) -> Tensor:
        U, V, S, B, base = tables
        few = len(S) <= samples_to_plan(x)  # a task's weight is built once, not for every sample
        weights = _scaled(U, S if few else S.index_select(0, tasks)) @ V
        if base is not None:
            weights = weights + base
        per_sample = (weights.index_select(0, tasks) if few else weights).to(working_dtype(x))
        biases = B.index_select(0, tasks).to(working_dtype(x)) if self.spec.bias else None
        return self._map_own(x, per_sample, biases)

    def _mixed_start(self, x: Tensor, tasks: Tensor, tables: Tables) -> Tensor | None:
        """What the sum of the factors is added to: the biases and the output of a kept weight."""
        B, base = tables.B, tables.base
        biases = self._per_sample(B.index_select(0, tasks), x) if self.spec.bias else None
        if base is None:
            return None if biases is None else biases.to(working_dtype(x))
        kept = self._map(x, base)
        return kept if biases is None else kept + biases.to(kept.dtype)

    def _learning(self, x: Tensor) -> Tensor:
        return self._of_one_task(x, LEARNING)

    def _of_one_task(self, x: Tensor, task: int) -> Tensor:
        if self._knows(task) and merging.is_on(self, x):
            return self._apply_dense(x, *merging.weights(self, working_dtype(x), task))
        return self._of_blocks(x, self._blocks(task), task)

    def _of_blocks(self, x: Tensor, blocks: list[Block], task: int) -> Tensor:
        y = self._combine(x, blocks, learned=self._knows(task))
        return y + self._per_channel(self._bias(task)).to(y.dtype) if self.spec.bias else y

    def _apply_dense(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self._map(x, weight)
        return y if bias is None else y + self._per_channel(bias).to(y.dtype)

    def _combine(self, x: Tensor, blocks: list[Block], *, learned: bool) -> Tensor:
        rank = sum(len(selector) for _, _, selector in blocks)
        if self._takes_dense(x, rank, learned):
            return self._map(x, self._dense(blocks))
        return self._factored(x, blocks)

    def _takes_dense(self, x: Tensor, rank: int, learned: bool) -> bool:
        """Which form runs, by the shapes, the task's own rank and the device."""
        inputs, outputs = self.spec.inputs, self.spec.outputs
        # While a task is learned, W would need a gradient, as much work as applying a kept weight.
        kept = learned and self.base_weight is not None
        return dense_is_cheaper(self._positions(x), rank, inputs, outputs, kept=kept)

    def _factored(self, x: Tensor, blocks: list[Block]) -> Tensor:
        return self._add_base(x, reduce(torch.add, [self._term(x, *block) for block in blocks]))

    def _term(self, x: Tensor, U: Tensor, V: Tensor, selector: Tensor) -> Tensor:
        # Numbers are brought to the activations' dtype: under autocast they would promote these.
        hidden = self._map(x, V)
        return self._up(hidden * self._per_channel(selector).to(hidden.dtype), U)

    def _add_base(self, x: Tensor, y: Tensor) -> Tensor:
        return y if self.base_weight is None else y + self._map(x, self.base_weight)

    @abstractmethod
    def _check(self, x: Tensor) -> None:
        """Refuse an input that does not fit."""

    @abstractmethod
    def _positions(self, x: Tensor) -> int:
        """How many times the layer applies its matrix to this input."""

    @abstractmethod
    def _map(self, x: Tensor, matrix: Tensor) -> Tensor:
        """The layer with the matrix `[n, in]` for its weight: n output channels."""

    @abstractmethod
    def _up(self, hidden: Tensor, U: Tensor) -> Tensor:
        """The layer's outputs from R channels."""

    @property
    @abstractmethod
    def _pointwise(self) -> bool:
        """Whether an output sees only one position of the input."""

    @abstractmethod
    def _map_each(self, x: Tensor, matrices: Tensor, start: Tensor | None) -> Tensor:
        """`start` plus a matrix per sample, `[B, out, n]`, at every position of x's n channels."""

    @abstractmethod
    def _map_own(self, x: Tensor, weights: Tensor, biases: Tensor | None) -> Tensor:
        """The layer with weights per sample, `[B, out, in]`, and biases `[B, out]`."""

    @abstractmethod
    def _per_channel(self, row: Tensor) -> Tensor:
        """`row [n]`, shaped to multiply what has n channels."""

    @abstractmethod
    def _per_sample(self, rows: Tensor, x: Tensor) -> Tensor:
        """`rows [B, n]`, shaped to multiply a result of `x` with n channels."""


def _scaled(U: Tensor, selectors: Tensor) -> Tensor:
    return selectors[:, None] * U.t()  # [n, out, R]

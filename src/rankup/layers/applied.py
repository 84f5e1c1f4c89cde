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
    """A factored layer that a module calls with an input, for one task or for a mixed batch.

    This class has the ways to compute the sum of factors: as a dense weight or factor by factor,
    and for mixed batches in the three ways of `dispatch.mixed_way`. How a matrix is applied to an
    input is up to each kind of layer.
    """

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
        """The active task's W in the shape of torch's own layer, for a module's forward to read."""
        conv = self.spec.conv
        inputs = (conv.channels, *conv.kernel_size) if conv else (self.spec.inputs,)
        shape = self.spec.outputs, *inputs
        return self._read_of_task("weight", shape, lambda task: self._as_torchs(self.matrix(task)))

    def _as_torchs(self, matrix: Tensor) -> Tensor:
        return matrix

    @property
    def bias(self) -> Tensor | None:
        """The bias of the active task, if there is one, for a module's forward to read."""
        if not self.spec.bias:
            return None
        shape = (self.spec.outputs,)
        return self._read_of_task("bias", shape, lambda task: self._bias(task).to(self.computes_in))

    def _mixed(self, x: Tensor, tasks: Tensor) -> Tensor:
        tables, way = self._tables(), self._mixed_way(x)
        # A convolution with a kernel per sample has as many groups as there are samples, so
        # torch.compile would compile it again for every batch size.
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
        rank = S.shape[1]  # U and V may be padded while a task is learned on a GPU
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
        """What the factors' output is added to: biases and the output of the kept weight."""
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
        """Whether W is built and applied, and not its factors one after another."""
        inputs, outputs = self.spec.inputs, self.spec.outputs
        # While a task is learned, W needs a gradient, which costs as much as applying W₀.
        kept = learned and self.base_weight is not None
        return dense_is_cheaper(self._positions(x), rank, inputs, outputs, kept=kept)

    def _factored(self, x: Tensor, blocks: list[Block]) -> Tensor:
        return self._add_base(x, reduce(torch.add, [self._term(x, *block) for block in blocks]))

    def _term(self, x: Tensor, U: Tensor, V: Tensor, selector: Tensor) -> Tensor:
        # Selectors are cast, because under autocast they would promote the activations.
        hidden = self._map(x, V)
        return self._up(hidden * self._per_channel(selector).to(hidden.dtype), U)

    def _add_base(self, x: Tensor, y: Tensor) -> Tensor:
        return y if self.base_weight is None else y + self._map(x, self.base_weight)

    @abstractmethod
    def _check(self, x: Tensor) -> None:
        """Raise if the shape or dtype of an input does not fit."""

    @abstractmethod
    def _positions(self, x: Tensor) -> int:
        """At how many positions of this input, over all samples, the layer applies its matrix."""

    @abstractmethod
    def _map(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Apply a weight, given as a matrix `[n, in]`; the result has n channels."""

    @abstractmethod
    def _up(self, hidden: Tensor, U: Tensor) -> Tensor:
        """Map R hidden channels to the layer's outputs by `U [R, out]`."""

    @property
    @abstractmethod
    def _pointwise(self) -> bool:
        """Whether each output depends on only one position of the input."""

    @abstractmethod
    def _map_each(self, x: Tensor, matrices: Tensor, start: Tensor | None) -> Tensor:
        """Apply a matrix per sample, `[B, out, n]`, at every position of `x`, which has n channels,
        and add `start`."""

    @abstractmethod
    def _map_own(self, x: Tensor, weights: Tensor, biases: Tensor | None) -> Tensor:
        """Apply a weight per sample, `[B, out, in]`, and add biases `[B, out]`."""

    @abstractmethod
    def _per_channel(self, row: Tensor) -> Tensor:
        """`row [n]`, shaped to broadcast over activations with n channels."""

    @abstractmethod
    def _per_sample(self, rows: Tensor, x: Tensor) -> Tensor:
        """`rows [B, n]`, shaped to broadcast over activations like `x` but with n channels."""


def _scaled(U: Tensor, selectors: Tensor) -> Tensor:
    return selectors[:, None] * U.t()  # [n, out, R]

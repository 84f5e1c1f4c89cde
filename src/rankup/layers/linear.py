"""Linear layers whose weights are a sum of factors."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankup.layers import merging, mixed_linear
from rankup.layers.applied import AppliedLayer
from rankup.layers.autograd import FactoredMap, KeptMap, kept_map
from rankup.layers.dispatch import length_to_plan, merging_is_cheaper, samples_to_plan
from rankup.layers.mixed_call import GatheringLayer, MixedTables
from rankup.layers.precomputed import PROJECTED
from rankup.layers.tables import Tables, read_tables
from rankup.layers.task_context import LEARNING
from rankup.layers.tensors import needs_torchs_operations, over_last, working_dtype

# From this many samples on, a CPU multiplies faster by few factors with samples as columns.
_COLUMNS_FROM = 32  # samples of one task
_MIXED_COLUMNS_FROM = 16  # samples of a mixed batch


class FactoredLinear(AppliedLayer, GatheringLayer):
    """`nn.Linear` as a sum of factors, for inputs `[B, …, in]`."""

    @property
    def in_features(self) -> int:
        return self.spec.inputs

    @property
    def out_features(self) -> int:
        return self.spec.outputs

    @property
    def applies_kept_weight(self) -> bool:
        return self.base_weight is not None

    def project(self, x: Tensor) -> Tensor:
        """`x V_oldᵀ` for inputs `x [N, in]`, which stays the same while a task is learned."""
        return x @ self.old_V.t()

    def _learning(self, x: Tensor) -> Tensor:
        rank = len(self.new_selector)
        layer, projected = PROJECTED.value or (None, None)
        if layer != self.spec.name:
            projected = None
        if self._adds_to_kept(x, rank):
            return self._learning_kept(x)
        if not self._takes_node(x, rank, projected):
            if projected is None:
                return self._of_one_task(x, LEARNING)
            return self._projected_by_autograd(x, projected)
        flat = x.reshape(-1, self.in_features)
        y: Tensor = FactoredMap.apply(flat, *self._node_inputs(), projected)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], self.out_features)

    def _node_inputs(self) -> tuple[Tensor | None, ...]:
        """The arguments that both autograd functions have in common."""
        new = "new_U" in self._parameters
        return (
            self.new_selector,
            self.new_U if new else None,
            self.new_V if new else None,
            self._bias(LEARNING) if self.spec.bias else None,
            self.old_U,
            self.old_V,
        )

    def _adds_to_kept(self, x: Tensor, rank: int) -> bool:
        """Whether there is a kept weight and it is cheaper to apply it and the factors than W."""
        return self.base_weight is not None and not self._takes_dense(x, rank, learned=False)

    def _learning_kept(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features).to(working_dtype(x))
        inputs: tuple[Any, ...] = (flat, *self._node_inputs(), self.base_weight)
        if _is_mapped():
            y = kept_map(*inputs)
        else:
            merges = merging_is_cheaper(self._positions(x), self.in_features, self.out_features)
            y = KeptMap.apply(*inputs, merges)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], self.out_features)

    def _of_one_task(self, x: Tensor, task: int) -> Tensor:
        learned, matrix = self._knows(task), x.dim() == 2
        plain = learned and matrix and self.has_one_dtype and x.is_cpu and not _transformed(x)
        if not plain or merging.is_on(self, x):
            return super()._of_one_task(x, task)
        U, V, selector = block = self.block(task)
        if self._takes_dense(x, len(selector), learned):
            return self._of_blocks(x, [block], task)
        # Fewer operations than `_of_blocks`: on a CPU, starting one takes longer than its work.
        *_, B, base = read_tables(self._buffers)
        if len(x) >= _COLUMNS_FROM:
            hidden = ((V @ x.t()) * selector[:, None]).t()
        else:
            hidden = F.linear(x, V) * selector
        y = torch.addmm(B[task], hidden, U) if self.spec.bias else hidden @ U
        return y if base is None else y + F.linear(x, base)

    def _takes_node(self, x: Tensor, rank: int, projected: Tensor | None) -> bool:
        """Whether `FactoredMap` is used: not with a kept weight, where building W is cheaper, or
        under a transform that does not support such functions."""
        if _transformed(x) or not self.has_one_dtype:
            return False
        return projected is not None or not (
            self.base_weight is not None or self._takes_dense(x, rank, learned=False)
        )

    def _projected_by_autograd(self, x: Tensor, projected: Tensor) -> Tensor:
        """What `FactoredMap` computes for a given projection, in torch's own operations."""
        old, added = len(self.old_U), "new_U" in self._parameters
        y = (projected * self.new_selector[:old].to(projected.dtype)) @ self.old_U
        if added:
            hidden = x.reshape(-1, self.in_features) @ self.new_V.t()
            y = y + (hidden * self.new_selector[old:].to(hidden.dtype)) @ self.new_U
        y = y + self._bias(LEARNING).to(y.dtype) if self.spec.bias else y
        return y.view(*x.shape[:-1], self.out_features)

    def merged(self, task: int) -> nn.Module:
        linear = nn.Linear(self.in_features, self.out_features, self.spec.bias, device="meta")
        linear.weight = nn.Parameter(self.matrix(task))
        if self.spec.bias:
            linear.bias = nn.Parameter(self._bias(task).to(self.computes_in, copy=True))
        return linear

    def _check(self, x: Tensor) -> None:
        if x.shape[-1] != self.in_features:
            self._refuse_shape(x, f"{self.in_features} features in the last dimension")
        if x.dim() < 2:
            self._refuse_shape(x, f"[samples, …, {self.in_features} features]")
        self._check_dtype(x)

    def _positions(self, x: Tensor) -> int:
        return samples_to_plan(x) * length_to_plan(x)

    def _map(self, x: Tensor, matrix: Tensor) -> Tensor:
        return F.linear(x, matrix.to(working_dtype(x)))

    def _up(self, hidden: Tensor, U: Tensor) -> Tensor:
        return hidden @ U.to(hidden.dtype)

    def _mixed(self, x: Tensor, tasks: Tensor) -> Tensor:
        if self.base_weight is not None and not needs_torchs_operations():
            return self._mixed_beside_kept(x, tasks)
        if _transformed(x) or not self.has_one_dtype:
            return super()._mixed(x, tasks)
        # With one position per sample, a matrix per sample never pays.
        if x.dim() == 2:
            return self._mixed_rows(x, tasks)
        if x.is_cpu and self._mixed_way(x) == "hidden":
            rows = tasks.repeat_interleave(math.prod(x.shape[1:-1]))
            y = self._mixed_rows(x.reshape(-1, self.in_features), rows)
            return y.view(*x.shape[:-1], self.out_features)
        return super()._mixed(x, tasks)

    def _mixed_rows(self, x: Tensor, tasks: Tensor) -> Tensor:
        """`[N, out]` for `x [N, in]` and the task of each row. In place, to save copies."""
        U, V, S, B, base = read_tables(self._buffers)
        if len(U) != (rank := S.shape[1]):  # padded by steps of a task being learned, on a GPU
            U, V = U[:rank], V[:rank]
        as_columns = x.is_cpu and len(x) >= _MIXED_COLUMNS_FROM
        hidden = (V @ x.t()).t() if as_columns else F.linear(x, V)
        hidden.mul_(S.index_select(0, tasks))
        y: Tensor = B.index_select(0, tasks).addmm_(hidden, U) if self.spec.bias else hidden @ U
        return y if base is None else y.addmm_(x, base.t())

    def _mixed_beside_kept(self, x: Tensor, tasks: Tensor) -> Tensor:
        dtype, base = working_dtype(x), self.base_weight
        assert base is not None
        flat, gathered = x.reshape(-1, self.in_features), self._gathered(tasks, dtype)  # [N, in]
        y = mixed_linear.answer(flat, gathered, base, self._shared_bias is not None, dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def mixed_sources(self) -> tuple[Tensor, ...]:
        if self.base_weight is None:
            return ()
        # A weight that is divided among processes is not whole outside of its layer's forward.
        sources = read_tables(self._buffers)[: None if self.may_merge else -1]
        return sources if self._shared_bias is None else (*sources, self._shared_bias)

    def mixed_tables(self, dtype: torch.dtype) -> MixedTables:
        if self.base_weight is None:
            return MixedTables()
        tables = Tables(*read_tables(self._buffers))
        biases = self.spec.has_own_bias, self._shared_bias
        return mixed_linear.tables(tables, dtype, *biases, self.may_merge)

    @property
    def _shared_bias(self) -> Tensor | None:
        return self._buffers["base_bias"] if self.spec.shared_bias else None

    def _apply_dense(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    @property
    def _pointwise(self) -> bool:
        return True

    def _map_each(self, x: Tensor, matrices: Tensor, start: Tensor | None) -> Tensor:
        flat, mirrored = _sequence(x), matrices.transpose(1, 2)
        if start is None:
            y = torch.bmm(flat, mirrored)
        else:
            y = torch.baddbmm(_sequence(start), flat, mirrored)
        return y.view(*x.shape[:-1], y.shape[-1])

    def _map_own(self, x: Tensor, weights: Tensor, biases: Tensor | None) -> Tensor:
        return self._map_each(x, weights, None if biases is None else over_last(biases, x))

    def _per_channel(self, row: Tensor) -> Tensor:
        return row

    def _per_sample(self, rows: Tensor, x: Tensor) -> Tensor:
        return over_last(rows, x)


def _sequence(x: Tensor) -> Tensor:
    """`[B, …, n]` reshaped to `[B, positions, n]`."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])


def _is_mapped() -> bool:
    """Whether a torch.func transform or forward-mode differentiation is active.

    Not torch.compile: it can trace `KeptMap`, which computes gradients of new factors alone. Of
    torch's own operations it would also compute those of frozen factors, and then drop them.
    """
    if torch.compiler.is_compiling():
        return torch._C._are_functorch_transforms_active()
    return needs_torchs_operations()


def _transformed(x: Tensor) -> bool:
    """Whether autocast, a torch.func transform, forward-mode differentiation or torch.compile is
    active. These do not support our own autograd functions or in-place operations on tensors that
    they have not seen; torch.compile finds such optimisations by itself."""
    return torch.is_autocast_enabled(x.device.type) or needs_torchs_operations()

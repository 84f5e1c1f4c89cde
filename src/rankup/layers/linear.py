"""Linear layers whose weights are a sum of factors."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankup.layers import beside_kept, merging
from rankup.layers.applied import AppliedLayer
from rankup.layers.autograd import FactoredMap, KeptMap, kept_map
from rankup.layers.dispatch import length_to_plan, merging_is_cheaper, samples_to_plan
from rankup.layers.mixed_call import GatheringLayer, MixedTables
from rankup.layers.precomputed import PROJECTED
from rankup.layers.tables import Tables, read_tables
from rankup.layers.task_context import LEARNING
from rankup.layers.tensors import needs_torchs_operations, over_last, working_dtype

# From so many samples a CPU is faster with samples as columns, if factors are few.
_MANY = 32  # of one task
_SEVERAL = 16  # of a mixed batch


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
        """Inputs `[N, in]` projected by the frozen factors: constant while a task is learned."""
        return x @ self.old_V.t()

    def _learning(self, x: Tensor) -> Tensor:
        given, rank = PROJECTED.value, len(self.new_selector)
        seen = given[1] if given is not None and given[0] == self.spec.name else None
        if self._adds_to_kept(x, rank):
            return self._learning_kept(x)
        if not self._takes_node(x, rank, seen):
            if seen is None:
                return self._of_one_task(x, LEARNING)
            return self._projected_by_autograd(x, seen)
        y: Tensor = FactoredMap.apply(  # type: ignore[no-untyped-call]
            x.reshape(-1, self.in_features), *self._read_by_nodes(), seen
        )
        return y.view(*x.shape[:-1], self.out_features)

    def _read_by_nodes(self) -> tuple[Tensor | None, ...]:
        """The selector, new factors, bias and old factors, as nodes of autograd take them."""
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
        """Whether a kept weight and all factors are applied without a gradient of their sum."""
        return self.base_weight is not None and not self._takes_dense(x, rank, learned=False)

    def _learning_kept(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features).to(working_dtype(x))
        given: tuple[Any, ...] = (flat, *self._read_by_nodes(), self.base_weight)
        if _is_mapped():
            y = kept_map(*given)
        else:
            merges = merging_is_cheaper(self._positions(x), self.in_features, self.out_features)
            y = KeptMap.apply(*given, merges)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], self.out_features)

    def _of_one_task(self, x: Tensor, task: int) -> Tensor:
        learned, matrix = self._knows(task), x.dim() == 2
        plain = learned and matrix and self.has_one_dtype and x.is_cpu and not _transformed(x)
        if not plain or merging.is_on(self, x):
            return super()._of_one_task(x, task)
        U, V, selector = block = self.block(task)
        if self._takes_dense(x, len(selector), learned):
            return self._of_blocks(x, [block], task)
        # The same in fewer operations: on a CPU, launching one takes longer than its arithmetic.
        *_, B, base = read_tables(self._buffers)
        if len(x) >= _MANY:
            hidden = ((V @ x.t()) * selector[:, None]).t()
        else:
            hidden = F.linear(x, V) * selector
        y = torch.addmm(B[task], hidden, U) if self.spec.bias else hidden @ U
        return y if base is None else y + F.linear(x, base)

    def _takes_node(self, x: Tensor, rank: int, seen: Tensor | None) -> bool:
        """Whether the hand-written autograd node can be used: not with a kept weight, not where
        building W is cheaper, and not under a transform that does not support such nodes."""
        if _transformed(x) or not self.has_one_dtype:
            return False
        return seen is not None or not (
            self.base_weight is not None or self._takes_dense(x, rank, learned=False)
        )

    def _projected_by_autograd(self, x: Tensor, seen: Tensor) -> Tensor:
        """What the node computes, in torch's own operations."""
        old, added = len(self.old_U), "new_U" in self._parameters
        y = (seen * self.new_selector[:old].to(seen.dtype)) @ self.old_U
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
        # A matrix per sample for just one position is never less work.
        if x.dim() == 2:
            return self._mixed_rows(x, tasks)
        if x.is_cpu and self._mixed_way(x) == "hidden":
            rows = tasks.repeat_interleave(math.prod(x.shape[1:-1]))
            y = self._mixed_rows(x.reshape(-1, self.in_features), rows)
            return y.view(*x.shape[:-1], self.out_features)
        return super()._mixed(x, tasks)

    def _mixed_rows(self, x: Tensor, tasks: Tensor) -> Tensor:
        """For a matrix of rows. In place, because adding a product to something otherwise begins
        with a copy of that."""
        U, V, S, B, base = read_tables(self._buffers)
        if len(U) != (rank := S.shape[1]):  # padded by steps of a task being learned, on a GPU
            U, V = U[:rank], V[:rank]
        # Also faster with samples as columns, and already so for fewer of them.
        hidden = (V @ x.t()).t() if x.is_cpu and len(x) >= _SEVERAL else F.linear(x, V)
        hidden.mul_(S.index_select(0, tasks))
        y: Tensor = B.index_select(0, tasks).addmm_(hidden, U) if self.spec.bias else hidden @ U
        return y if base is None else y.addmm_(x, base.t())

    def _mixed_beside_kept(self, x: Tensor, tasks: Tensor) -> Tensor:
        dtype, base = working_dtype(x), self.base_weight
        assert base is not None
        flat, own = x.reshape(-1, self.in_features), self._gathered(tasks, dtype)  # [N, in]
        y = beside_kept.answer(flat, own, base, self._shared_bias is not None, dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def mixed_sources(self) -> tuple[Tensor, ...]:
        if self.base_weight is None:
            return ()
        # A divided weight is whole only while its layer runs, and then no table is made of it.
        sources = read_tables(self._buffers)[: None if self.may_merge else -1]
        return sources if self._shared_bias is None else (*sources, self._shared_bias)

    def mixed_tables(self, dtype: torch.dtype) -> MixedTables:
        if self.base_weight is None:
            return MixedTables()
        tables = Tables(*read_tables(self._buffers))
        biases = self.spec.has_own_bias, self._shared_bias
        return beside_kept.tables(tables, dtype, *biases, self.may_merge)

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
    """`[B, …, n]` with all positions of a sample in one dimension."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])


def _is_mapped() -> bool:
    """Whether a transform of torch.func or forward-mode derivatives are on. A compiler can trace
    the node, whose gradients are those of new factors alone: of autograd's it would slice off the
    frozen ones' only after computing them."""
    if torch.compiler.is_compiling():
        return torch._C._are_functorch_transforms_active()
    return needs_torchs_operations()


def _transformed(x: Tensor) -> bool:
    """Whether autocast, a transform of torch.func, forward-mode derivatives or a compiler are on:
    these support neither nodes of our own nor in-place operations on what they have not seen, and a
    compiler chooses such details itself."""
    return torch.is_autocast_enabled(x.device.type) or needs_torchs_operations()

"""Weights that are a sum of factors: their tables, and what a task adds to them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rankup import seeds
from rankup.distributed.sharding import whole
from rankup.layers.base import Start, TaskLayer
from rankup.layers.spec import FactoredSpec
from rankup.layers.tables import (
    Block,
    Selection,
    after_removal,
    cut_out,
    read_tables,
    rows_of,
    spans_of,
    without_row,
)
from rankup.layers.tensors import Tensors
from rankup.rank import Place


class FactoredLayer(TaskLayer):
    """A layer whose weight is `W_t = W₀ + Σ_i s_{i,t} · u_i v_iᵀ`, summed over the factors i that
    task t selects from. W₀ is the kept weight, if there is one.

    Attributes:
        U: `[R, out]`, the factors' vectors: first the seeded factors, then those of task after
            task. If every task selects from all before it, a task's factors are a prefix.
        V: `[R, in]`, likewise.
        S: `[T, R]`, each task's selectors, zero for factors that it does not select from.
        B: `[T, out]`, each task's bias.
        old_U, old_V: the frozen factors that the open task selects from.
    """

    spec: FactoredSpec
    U: Tensor
    V: Tensor
    S: Tensor
    B: Tensor
    base_weight: Tensor | None
    base_bias: Tensor | None
    new_U: Tensor
    new_V: Tensor
    new_selector: Tensor
    new_bias: Tensor

    def __init__(
        self, spec: FactoredSpec, seed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(spec, seed, dtype, device)
        for key, length in (("U", spec.outputs), ("V", spec.inputs)):
            seeded = seeds.signs(seed, spec.name, key, spec.rank.seeded, length, self.dtype)
            self.register_buffer(key, seeded.to(device))
        self.register_buffer("S", torch.empty(0, spec.rank.seeded, **self._factory))
        self.register_buffer("B", torch.empty(0, spec.outputs, **self._factory))
        self.register_buffer("base_weight", None)
        self.register_buffer("base_bias", None)
        self.selections: list[Selection] = []  # of each task
        self.ends = [spec.rank.seeded]  # rows at which the seeded and each task's factors end
        self.place = Place()  # of the task being learned
        self.may_merge = True  # whether W₀ and a task's factors may be merged: see `merging.py`

    @property
    def old_names(self) -> tuple[str, str]:
        """The names of the buffers that `old_U` and `old_V` are."""
        return ("chosen_U", "chosen_V") if "chosen_U" in self._buffers else ("U", "V")

    @property
    def old_U(self) -> Tensor:
        return getattr(self, self.old_names[0])  # type: ignore[no-any-return]

    @property
    def old_V(self) -> Tensor:
        return getattr(self, self.old_names[1])  # type: ignore[no-any-return]

    @property
    def applies_kept_weight(self) -> bool:
        """Whether the kept weight is applied by itself, in the dtype of the activations."""
        return False

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *rest: Any, **kwargs: Any
    ) -> None:
        *_, errors = rest
        for key in ("U", "V"):
            seeded = getattr(self, key)[: self.spec.rank.seeded]
            loaded = state_dict.get(f"{prefix}{key}", seeded)[: len(seeded)]
            if loaded.shape == seeded.shape and not torch.equal(loaded.to(seeded), seeded):
                errors.append(
                    f"layer {self.spec.name!r} has seeded factors from another seed, which are not "
                    f"stored in any file: grow the network with that seed, not {self.seed}"
                )
                return
        super()._load_from_state_dict(state_dict, prefix, *rest, **kwargs)

    def extra_repr(self) -> str:
        spec = self.spec
        conv = f", kernel={spec.conv.kernel_size}, stride={spec.conv.stride}" if spec.conv else ""
        of = f"in={spec.inputs}, out={spec.outputs}, bias={spec.bias}{conv}"
        return f"{of}, factors={len(self.U)}"

    def constants(self) -> tuple[Tensor, ...]:
        """All tables. They are replaced by new ones when a task is committed or removed."""
        return tuple(table for table in read_tables(self._buffers) if table is not None)

    def matrix(self, task: int) -> Tensor:
        """The task's W as a matrix, `[out, in]`."""
        return self._dense(self._blocks(task)).to(self.computes_in)

    def start(self, classes: int, start: Start) -> Tensors:
        outputs, inputs = self.spec.outputs, self.spec.inputs
        place = start.place or Place.number(self.count)
        values = {"selector": self._start_selector(start, place)}
        if added := self.spec.rank.added(place):
            values["U"] = self._orthogonal(added, outputs, "U", start.key) * start.factors
            values["V"] = self._orthogonal(added, inputs, "V", start.key) * start.factors
            if self.base_weight is not None:
                # A pretrained layer starts as it was. U still gets a gradient through V.
                values["U"].zero_()
        if self.spec.has_own_bias:
            zero = torch.zeros(outputs, **self._factory)
            values["bias"] = zero if self.base_bias is None else self.base_bias.clone()
        return values

    def open(self, values: Tensors, start: Start | None = None) -> None:
        start = start or Start()
        self.place = start.place or Place.number(self.count)
        if start.selection is not None:
            spans = spans_of(self.ends, start.selection)
            for key in ("U", "V"):
                chosen = rows_of(getattr(self, key), spans)
                self.register_buffer(f"chosen_{key}", chosen, persistent=False)
        super().open(values)

    def close(self) -> None:
        super().close()
        self._buffers = {k: t for k, t in self._buffers.items() if not k.startswith("chosen_")}
        self._non_persistent_buffers_set -= {"chosen_U", "chosen_V"}

    def extended(self, *added: Tensors, selections: Sequence[Selection] = (None,)) -> Tensors:
        tables = {}
        if learned := [tensors for tensors in added if "U" in tensors]:
            for key in ("U", "V"):
                rows = (tensors[key] for tensors in learned)
                tables[key] = torch.cat([getattr(self, key), *rows])
        ends = self._ends_with(selections)
        S = self.S.new_zeros(self.count + len(added), ends[-1])
        S[: self.count, : self.S.shape[1]] = self.S
        new = zip(added, selections, strict=True)
        for task, (tensors, selection) in enumerate(new, self.count):
            spans = spans_of(ends, selection, task)
            parts = torch.split(tensors["selector"], [end - start for start, end in spans])
            for (start, end), part in zip(spans, parts, strict=True):
                S[task, start:end] = part
        tables["S"] = S
        if self.spec.bias:
            tables["B"] = torch.cat([self.B, *(self._bias_row(tensors) for tensors in added)])
        return tables

    def _bias_row(self, added: Tensors) -> Tensor:
        bias = self.base_bias if self.spec.shared_bias else added["bias"]
        assert bias is not None
        return bias[None]

    def install(self, tables: Tensors, selections: Sequence[Selection] = (None,)) -> None:
        self.ends = self._ends_with(selections)
        self.selections = [*self.selections, *selections]
        super().install(tables, selections)

    def _ends_with(self, selections: Sequence[Selection]) -> list[int]:
        """`ends` after tasks with these selections are added."""
        ends = list(self.ends)
        for index, selection in enumerate(selections, self.count):
            place = Place(roots=index if selection is None else len(selection))
            ends.append(ends[-1] + self.spec.rank.added(place))
        return ends

    def without(self, task: int) -> Tensors:
        start, end = self.ends[task : task + 2]
        tables = {key: cut_out(getattr(self, key), start, end) for key in ("U", "V")}
        tables["S"] = cut_out(without_row(self.S, task).t(), start, end).t().contiguous()
        return tables | {"B": without_row(self.B, task)} if self.spec.bias else tables

    def drop(self, task: int, tables: Tensors) -> None:
        start, end = self.ends[task : task + 2]
        self.ends = [*self.ends[: task + 1], *(e - (end - start) for e in self.ends[task + 2 :])]
        del self.selections[task]
        self.selections = [after_removal(selection, task) for selection in self.selections]
        super().drop(task, tables)

    def added(self, task: int) -> Tensors:
        start, end = self.ends[task : task + 2]
        added = {"selector": self.block(task)[2]}
        if end > start:
            added |= {"U": self.U[start:end], "V": self.V[start:end]}
        return added | {"bias": self.B[task]} if self.spec.has_own_bias else added

    def _start_selector(self, start: Start, place: Place) -> Tensor:
        """`[R]`: over seeded factors, those of earlier tasks and, starting at 1, the task's own."""
        rank = self.spec.rank
        selector = torch.ones(rank.used(place), **self._factory)
        old = rank.used(place) - rank.added(place)
        previous = start.previous(self.count)
        if isinstance(start.selectors, str) and previous is not None:
            spans = spans_of(self.ends, start.selection)
            selector[:old] = torch.cat([self.S[previous, first:end] for first, end in spans])
            if start.selectors == "halfway":  # between where that task started and where it ended
                first, end = self.ends[previous : previous + 2]
                selector[old - (end - first) : old] /= 2
            return selector
        if not isinstance(start.selectors, str):
            selector[:old] = start.selectors
        # Over seeded factors, selectors that start at zero would let the layer compute nothing and
        # never learn; this deviation gives W the usual scale. A kept W₀ starts as it was.
        if self.base_weight is None:
            gain = 1 if self.spec.before_batch_norm else 2
            deviation = math.sqrt(gain * self.spec.outputs / max(1, rank.seeded))
            drawn = seeds.normal(rank.seeded, generator=self._draw("selector", start.key))
            selector[: rank.seeded] = (deviation * drawn).to(**self._factory)
        else:
            selector[: rank.seeded] = 0
        return selector

    def _blocks(self, task: int) -> list[Block]:
        """All factors of a committed task, or the old and the new ones of the open task."""
        if self._knows(task):
            return [self.block(task)]
        # Separate blocks, so that autograd computes no gradients of frozen factors. Old ones may
        # be padded with rows of zeros, which change nothing.
        old = len(self.old_U)
        blocks = [(self.old_U, self.old_V, self.new_selector[:old])] if old else []
        if "new_U" in self._parameters:
            blocks.append((self.new_U, self.new_V, self.new_selector[old:]))
        return blocks

    def block(self, task: int) -> Block:
        """The factors that a committed task selects from, in its own order, and its selector, at
        aligned addresses, so that the bits of products do not depend on other tasks."""
        U, V, S, *_ = read_tables(self._buffers)
        selection = self.selections[task]
        if selection is None:
            end = self.ends[task + 1]
            return U[:end], V[:end], S[task, :end]
        spans = spans_of(self.ends, selection, task)
        return rows_of(U, spans), rows_of(V, spans), rows_of(S[task], spans)

    def _bias(self, task: int) -> Tensor:
        if self.spec.shared_bias:
            assert self.base_bias is not None
            return self.base_bias
        return self.B[task] if self._knows(task) else self.new_bias

    def _dense(self, blocks: list[Block]) -> Tensor:
        """W, `[out, in]`."""
        # Not under autocast: W is small, and casting its many factors would take longer.
        with torch.autocast(self.U.device.type, enabled=False):
            base = self.base_weight
            weight = None if base is None else whole(base).to(self.dtype)
            for given in blocks:
                U, V, selector = (tensor.to(self.dtype) for tensor in given)
                scaled = (U * selector[:, None]).t()
                weight = scaled @ V if weight is None else torch.addmm(weight, scaled, V)
        assert weight is not None
        return weight

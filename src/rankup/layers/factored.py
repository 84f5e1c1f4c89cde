"""The base class of linear and convolutional layers whose weights are a sum of factors."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from rankup import seeds
from rankup.distributed.sharding import whole
from rankup.errors import TaskStateError
from rankup.layers import merging
from rankup.layers.base import (
    Selection,
    Start,
    TaskLayer,
    Tensors,
    cut_out,
    without_row,
    working_dtype,
)
from rankup.layers.dispatch import (
    MixedShape,
    MixedWay,
    dense_is_cheaper,
    mixed_way,
    samples_to_plan,
)
from rankup.layers.spec import FactoredSpec
from rankup.layers.tables import (
    Block,
    Tables,
    after_removal,
    read_tables,
    rows_of,
    spans_of,
)
from rankup.layers.task_context import LEARNING
from rankup.rank import Place


class FactoredLayer(TaskLayer):
    """`W_t = W₀ + Σ_i s_{i,t} · u_i v_iᵀ` over the factors that task t selects from, with W₀ if one
    was kept.

    Tables: `U [R, out]` and `V [R, in]`, seeded factors first, then each task's own; `S [T, R]`,
    zero where a task does not select; `B [T, out]`. If every task selects from all before it, a
    task's factors are a prefix. `old_U` and `old_V` are what the task being learned selects from.
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
        self.ends = [spec.rank.seeded]  # where each task's own factors end, the seeded ones first
        self.place = Place()  # of the task being learned
        self.may_merge = True  # whether the network is small enough

    @property
    def old_names(self) -> tuple[str, str]:
        """The names of the tables of frozen factors that the task being learned selects from."""
        return ("chosen_U", "chosen_V") if "chosen_U" in self._buffers else ("U", "V")

    @property
    def old_U(self) -> Tensor:
        return getattr(self, self.old_names[0])  # type: ignore[no-any-return]

    @property
    def old_V(self) -> Tensor:
        return getattr(self, self.old_names[1])  # type: ignore[no-any-return]

    @property
    def applies_kept_weight(self) -> bool:
        """Whether a kept weight is applied by itself, in the dtype of the activations."""
        return False

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

    def constants(self) -> tuple[Tensor, ...]:
        """All tables there are, which are made anew when a task is committed or removed."""
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
                # A pretrained layer starts as it was; V and the selector keep the gradient alive.
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
        """Where tasks' own factors end in the tables, with more tasks."""
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
        rank = self.spec.rank
        selector = torch.ones(rank.used(place), **self._factory)
        old = rank.used(place) - rank.added(place)
        previous = start.previous(self.count)
        if start.selectors == "previous" and previous is not None:
            spans = spans_of(self.ends, start.selection)
            selector[:old] = torch.cat([self.S[previous, first:end] for first, end in spans])
            return selector
        if start.selectors != "previous":
            selector[:old] = start.selectors
        # Over seeded factors a selector cannot start at zero, or the layer would compute nothing
        # and never learn; this deviation gives W the usual scale for its inputs. With a kept W₀,
        # zero is the start that leaves it as it was.
        if self.base_weight is None:
            gain = 1 if self.spec.before_batch_norm else 2
            deviation = math.sqrt(gain * self.spec.outputs / max(1, rank.seeded))
            drawn = seeds.normal(rank.seeded, generator=self._draw("selector", start.key))
            selector[: rank.seeded] = (deviation * drawn).to(**self._factory)
        else:
            selector[: rank.seeded] = 0
        return selector

    def _blocks(self, task: int) -> list[Block]:
        if self._knows(task):
            return [self.block(task)]
        # Old and new separately: autograd then spends nothing on the frozen ones. Zeros at the end
        # of the old ones, which give several tasks the same shapes, do no harm.
        old = len(self.old_U)
        blocks = [(self.old_U, self.old_V, self.new_selector[:old])] if old else []
        if "new_U" in self._parameters:
            blocks.append((self.new_U, self.new_V, self.new_selector[old:]))
        return blocks

    def block(self, task: int) -> Block:
        """The factors that a committed task selects from, in its own order, and its selector. They
        begin where memory of their own would, so that their bits do not depend on other tasks."""
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

    def _dense(self, blocks: list[Block]) -> Tensor:
        # In full precision: W is small, and casting its many factors would take longer.
        with torch.autocast(self.U.device.type, enabled=False):
            base = self.base_weight
            weight = None if base is None else whole(base).to(self.dtype)
            for given in blocks:
                U, V, selector = (tensor.to(self.dtype) for tensor in given)
                scaled = (U * selector[:, None]).t()
                weight = scaled @ V if weight is None else torch.addmm(weight, scaled, V)
        assert weight is not None
        return weight  # [out, in]

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

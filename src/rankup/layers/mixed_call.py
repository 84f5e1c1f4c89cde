"""A mixed batch's rows of the tables of all layers, gathered at once: for so small an operation,
starting it takes longer than its work."""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from rankup.layers.base import TaskLayer
from rankup.layers.cached import CACHE
from rankup.layers.tensors import needs_torchs_operations
from rankup.utils.per_thread import PerThread, set_to


class MixedTables(NamedTuple):
    """What a layer reads for mixed batches.

    Attributes:
        rows: tables with a row per task, `[T, n]`; for a given batch, the rows of its samples,
            `[B, 1, n]`.
        constant: other tensors, the same for all samples.
    """

    rows: Sequence[Tensor] = ()
    constant: tuple[Tensor, ...] = ()


class GatheringLayer(TaskLayer):
    """A layer whose tables are gathered together with those of the network's other layers."""

    def mixed_sources(self) -> tuple[Tensor, ...]:
        """The tensors that `mixed_tables` are computed from."""
        raise NotImplementedError

    def mixed_tables(self, dtype: torch.dtype) -> MixedTables:
        """What a mixed batch reads, if it is computed in this dtype."""
        raise NotImplementedError

    def _gathered(self, tasks: Tensor, dtype: torch.dtype) -> MixedTables:
        call = _call.value
        if call is not None and call.tasks is tasks and not needs_torchs_operations():
            return call.of(self, dtype)
        tables, constant = self.mixed_tables(dtype)  # outside of a mixed call, as in a trial
        return MixedTables([t.index_select(0, tasks)[:, None] for t in tables], constant)


class _Joined(tuple[Tensor, ...]):
    """The tables of all layers side by side, `[T, 1, n]`, and then their constant tensors.

    Attributes:
        widths: the width of each table.
        parts: for each layer, which of the tables are its own, and its constant tensors.
    """

    widths: list[int]
    parts: list[tuple[slice, tuple[Tensor, ...]]]


class MixedLayers:
    """The layers of a network whose tables are gathered together, layers of one class at once."""

    def __init__(self, layers: Sequence[TaskLayer]) -> None:
        self.by_kind: dict[type, list[GatheringLayer]] = defaultdict(list)
        self.places: dict[TaskLayer, int] = {}  # among those of its kind
        for layer in layers:
            if isinstance(layer, GatheringLayer):
                self.places[layer] = len(self.by_kind[type(layer)])
                self.by_kind[type(layer)].append(layer)

    def run_for(self, tasks: Tensor) -> AbstractContextManager[None]:
        """Inside, layers that run for this very tensor of tasks share what is gathered for it."""
        return set_to(_call, _Call(self, tasks))

    def joined(self, kind: type, dtype: torch.dtype) -> _Joined:
        layers = self.by_kind[kind]
        sources = [*chain.from_iterable(layer.mixed_sources() for layer in layers)]

        def make() -> _Joined:
            return _joined([layer.mixed_tables(dtype) for layer in layers])

        return cast(_Joined, CACHE.of(self, ("mixed", kind, dtype), sources, make))


def _joined(layers: Sequence[MixedTables]) -> _Joined:
    tables = [table for layer in layers for table in layer.rows]
    # Some layers may have one task more, because another thread is committing it.
    known = min(map(len, tables))
    side_by_side = torch.cat([table[:known] for table in tables], 1).unsqueeze(1)
    joined = _Joined([side_by_side, *(table for layer in layers for table in layer.constant)])
    joined.widths, joined.parts, start = [table.shape[1] for table in tables], [], 0
    for rows, constant in layers:
        joined.parts.append((slice(start, start := start + len(rows)), constant))
    return joined


class _Call:
    """The rows for one mixed batch, gathered when the first layer asks for them: in which dtype
    layers compute depends on autocast, which a module may switch off for some of them."""

    def __init__(self, layers: MixedLayers, tasks: Tensor) -> None:
        self.layers, self.tasks = layers, tasks
        self._found: dict[Any, tuple[tuple[Tensor, ...], _Joined]] = {}

    def of(self, layer: TaskLayer, dtype: torch.dtype) -> MixedTables:
        key = type(layer), dtype
        if key not in self._found:
            joined = self.layers.joined(*key)
            rows = torch.split(joined[0].index_select(0, self.tasks), joined.widths, 2)
            self._found[key] = rows, joined
        rows, joined = self._found[key]
        own, constant = joined.parts[self.layers.places[layer]]
        return MixedTables(rows[own], constant)


_call = PerThread[_Call]()

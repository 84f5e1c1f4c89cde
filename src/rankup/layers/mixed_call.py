"""What the layers of a network share while a mixed batch runs through them: the rows of all their
tables are gathered at once, because starting such a small operation takes longer than it."""

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
    """What a layer reads for mixed batches: tables with a row per task, `[T, n]`, and others. For
    one batch, `rows` are those of its samples, `[B, 1, n]`."""

    rows: Sequence[Tensor] = ()
    constant: tuple[Tensor, ...] = ()


class GatheringLayer(TaskLayer):
    """A layer whose rows are gathered together with those of the network's other layers."""

    def mixed_sources(self) -> tuple[Tensor, ...]:
        """What `mixed_tables` are made of."""
        raise NotImplementedError

    def mixed_tables(self, dtype: torch.dtype) -> MixedTables:
        """What a mixed batch reads that is computed in this dtype."""
        raise NotImplementedError

    def _gathered(self, tasks: Tensor, dtype: torch.dtype) -> MixedTables:
        call = _call.value
        if call is not None and call.tasks is tasks and not needs_torchs_operations():
            return call.of(self, dtype)
        tables, constant = self.mixed_tables(dtype)  # by itself, as in a trial
        return MixedTables([t.index_select(0, tasks)[:, None] for t in tables], constant)


class _Joined(tuple[Tensor, ...]):
    """All layers' tables per task side by side, `[T, 1, n]`, and then their others."""

    widths: list[int]  # of the tables
    parts: list[tuple[slice, tuple[Tensor, ...]]]  # which tables are a layer's, and its others


class MixedLayers:
    """The layers of a network whose rows are gathered together, those of one kind at a time."""

    def __init__(self, layers: Sequence[TaskLayer]) -> None:
        self.by_kind: dict[type, list[GatheringLayer]] = defaultdict(list)
        self.places: dict[TaskLayer, int] = {}  # among those of its kind
        for layer in layers:
            if isinstance(layer, GatheringLayer):
                self.places[layer] = len(self.by_kind[type(layer)])
                self.by_kind[type(layer)].append(layer)

    def run_for(self, tasks: Tensor) -> AbstractContextManager[None]:
        """Inside, layers that run for just these tasks find what was gathered for all of them."""
        return set_to(_call, _Call(self, tasks))

    def joined(self, kind: type, dtype: torch.dtype) -> _Joined:
        layers = self.by_kind[kind]
        sources = [*chain.from_iterable(layer.mixed_sources() for layer in layers)]

        def make() -> _Joined:
            return _joined([layer.mixed_tables(dtype) for layer in layers])

        return cast(_Joined, CACHE.of(self, ("mixed", kind, dtype), sources, make))


def _joined(layers: Sequence[MixedTables]) -> _Joined:
    tables = [table for layer in layers for table in layer.rows]
    # Another thread may have committed a task to some of the layers.
    known = min(map(len, tables))
    side_by_side = torch.cat([table[:known] for table in tables], 1).unsqueeze(1)
    joined = _Joined([side_by_side, *(table for layer in layers for table in layer.constant)])
    joined.widths, joined.parts, start = [table.shape[1] for table in tables], [], 0
    for rows, constant in layers:
        joined.parts.append((slice(start, start := start + len(rows)), constant))
    return joined


class _Call:
    """One mixed batch. What is gathered waits for the first layer that asks for it: a module may
    leave autocast for some of them."""

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

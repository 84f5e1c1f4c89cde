"""The size of a network: how many numbers it stores, a task adds, and it holds in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from rankup.layers import FactoredLayer, TaskHead, TaskNorm, Tensors, pruned, rounding
from rankup.layers.spec import Shapes, Spec
from rankup.net.tasks import KnownTask, TaskList
from rankup.rank import Place

if TYPE_CHECKING:
    from rankup.net.network import IncrementalNet


@dataclass(frozen=True)
class Size:
    """Exact counts of numbers. All but `working` count what is stored: seeded factors are not, and
    a task has as many selectors as factors that it uses and has not dropped.

    Attributes:
        dense: numbers that are neither in factored layers nor per task.
        working: numbers in memory, including seeded and dropped factors and padding of tables.
        bytes: the size of all that is stored.
        router_bytes: the part of it that routers need.
        total: all stored numbers.
    """

    factors: int
    selectors: int
    biases: int
    norms: int
    heads: int
    dense: int
    working: int
    bytes: int
    router_bytes: int = 0
    total: int = field(init=False)

    def __post_init__(self) -> None:
        stored = self.factors + self.selectors + self.biases + self.norms + self.heads + self.dense
        object.__setattr__(self, "total", stored)


_STORED = ("factors", "selectors", "biases", "norms", "heads", "dense", "bytes", "router_bytes")


def of_network(net: IncrementalNet) -> Size:
    counts = dict.fromkeys(_STORED, 0)
    for task in range(len(net.tasks)):
        _add_task(counts, net, task)
    kept = [tensor for part in net.parts for tensor in part.base().values()]
    counts["dense"] += _numel(kept)
    counts["bytes"] += sum(tensor.nbytes for tensor in kept)
    if net.routing is not None:
        counts["bytes"] += (sums := net.routing.bytes_of_sums())
        counts["router_bytes"] += sums
    return Size(**counts, working=_numel(net.buffers()) + _numel(net.parameters()))


def of_task(net: IncrementalNet, task: int) -> Size:
    """The size of what a task added; `working` is what it takes to run that task alone."""
    counts = dict.fromkeys(_STORED, 0)
    _add_task(counts, net, task)
    working = 0
    for part in net.parts:
        working += _numel(part.base().values())
        if isinstance(part, FactoredLayer):
            used = len(part.added(task)["selector"])
            working += used * (part.spec.inputs + part.spec.outputs + 1)
            working += part.spec.outputs * part.spec.bias
        elif isinstance(part, TaskNorm):
            working += _numel(part.added(0 if part.spec.shared else task).values())
        elif isinstance(part, TaskHead):
            working += _numel(part.added(task).values())
        else:
            working += _numel(part.added(0).values())
    return Size(**counts, working=working)


def _add_task(counts: dict[str, int], net: IncrementalNet, task: int) -> None:
    if net.routing is not None:
        counts["bytes"] += (kept := net.routing.bytes_of(task))
        counts["router_bytes"] += kept
    for part in net.parts:
        added = part.added(task)
        counts["bytes"] += rounding.bytes_of(part.spec, added, net.options.store)
        added = rounding.stored(part.spec, added)
        if isinstance(part, FactoredLayer):
            counts["factors"] += _numel(_pick(added, "U", "V"))
            counts["selectors"] += _numel(_pick(added, "selector"))
            counts["biases"] += _numel(_pick(added, "bias"))
        elif isinstance(part, TaskNorm):
            counts["norms"] += _numel(added.values())
        elif isinstance(part, TaskHead):
            counts["heads"] += _numel(added.values())
        else:
            counts["dense"] += _numel(added.values())


def _pick(tensors: Tensors, *keys: str) -> list[Tensor]:
    return [tensors[key] for key in keys if key in tensors]


def _numel(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def kept_from_module(specs: Sequence[Spec]) -> int:
    """How many numbers a network stores of the module that it was grown from with `base="keep"`."""
    return sum(math.prod(shape) for spec in specs for shape in spec.base_shapes().values())


def stored_by_task(specs: Sequence[Spec], known: TaskList) -> list[int]:
    """How many numbers each task of a network stores, computed without its tensors."""
    return [
        sum(
            math.prod(shape)
            for spec in specs
            for shape in _stored_shapes(spec, known.place(task, index), task).values()
        )
        for index, task in enumerate(known.tasks)
    ]


def _stored_shapes(spec: Spec, place: Place, task: KnownTask) -> Shapes:
    shapes = spec.shapes(place, task.rows)
    return pruned.shapes_of(shapes, task.kept[spec.name]) if spec.name in task.kept else shapes

"""Summaries of a network: what became of each part of the module that it was grown from."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

from rankup.growing.names import folded
from rankup.layers.spec import FactoredSpec, HeadSpec, NormSpec, Spec, WeightSpec

if TYPE_CHECKING:
    from rankup.net.network import IncrementalNet


def of_network(net: IncrementalNet) -> str:
    """A line for each kind of part: what became of it, numbers that a later task adds, names."""
    names: dict[str, list[str]] = defaultdict(list)
    added: dict[str, int] = defaultdict(int)
    for spec in net.plan.layers:
        kind = _kind(spec)
        names[kind].append(spec.name)
        # A task of two classes; heads depend on them.
        added[kind] += sum(math.prod(shape) for shape in spec.shapes(1, 2).values())
    for name, shape in net.plan.dense.tensors:
        names["shared by all tasks"].append(f"{name} {list(shape)}")
    factored = sum(s.outputs * s.inputs for s in net.plan.layers if isinstance(s, FactoredSpec))
    shared = sum(math.prod(shape) for _, shape in net.plan.dense.tensors)
    lines = [f"{kind} ({added[kind]:,} numbers a task): {folded(n)}" for kind, n in names.items()]
    lines.append(f"{100 * factored / (factored + shared):.1f} % of the weights have factors")
    return "\n".join(lines)


def _kind(spec: Spec) -> str:
    if isinstance(spec, WeightSpec):
        return "factors, in a layer's own forward"
    if isinstance(spec, FactoredSpec):
        return "factors"
    if isinstance(spec, HeadSpec):
        return "head per task"
    return "norm per task" if isinstance(spec, NormSpec) else "tensor per task"

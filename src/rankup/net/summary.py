"""The summary of a network: what became of each part of the module that it was grown from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from rankup.growing.names import starred
from rankup.layers.spec import FactoredSpec, HeadSpec, NormSpec, Spec, TensorSpec, WeightSpec
from rankup.rank import Place

if TYPE_CHECKING:
    from rankup.net.network import IncrementalNet


class _Row(NamedTuple):
    part: str
    becomes: str
    given: int  # numbers of the module that were in it
    added: int  # numbers that a task adds after the first


def of_network(net: IncrementalNet) -> str:
    """A table with a line for each part, or for a part of many blocks: what became of it, how many
    numbers it had, and how many a task adds; and below it the share of numbers with factors."""
    rows = [_row_of(spec) for spec in net.plan.layers]
    shared = "shared, as given" if net.plan.dense.kept else "shared, learned with the first task"
    for name, shape in net.plan.dense.tensors:
        rows.append(_Row(name, shared, math.prod(shape), 0))
    merged: dict[tuple[str, str], _Row] = {}
    for row in rows:
        key = starred(row.part), row.becomes
        known = merged.get(key, _Row(*key, 0, 0))
        merged[key] = known._replace(given=known.given + row.given, added=known.added + row.added)
    lines = [_Row("part", "becomes", 0, 0), *merged.values()]
    widths = [max(len(str(row[column])) for row in lines) for column in (0, 1)]
    text = [f"{'part':<{widths[0]}}  {'becomes':<{widths[1]}} {'numbers':>13} {'a task adds':>13}"]
    for row in merged.values():
        names = f"{row.part:<{widths[0]}}  {row.becomes:<{widths[1]}}"
        text.append(f"{names} {row.given:>13,} {row.added:>13,}")
    given, added = (sum(row[column] for row in rows) for column in (2, 3))  # type: ignore[misc]
    factored = sum(s.outputs * s.inputs for s in net.plan.layers if isinstance(s, FactoredSpec))
    text.append(
        f"{100 * factored / max(1, given):.1f} % of {given:,} numbers are in matrices that have "
        f"factors; a task of two classes adds {added:,}"
    )
    return "\n".join(text)


def _row_of(spec: Spec) -> _Row:
    # A task of two classes; heads depend on them.
    added = sum(math.prod(shape) for shape in spec.shapes(Place.number(1), 2).values())
    given = sum(math.prod(shape) for shape in spec.base_shapes().values())
    if isinstance(spec, WeightSpec):
        return _Row(spec.name, f"{_factors(spec)}, in its layer's own forward", given, added)
    if isinstance(spec, FactoredSpec):
        return _Row(spec.name, _factors(spec), given, added)
    if isinstance(spec, HeadSpec):
        return _Row(spec.name, "a head for each task", 0, added)
    if isinstance(spec, NormSpec):
        per_task = "shared" if spec.shared else "a norm for each task"
        return _Row(spec.name, per_task, given, added)
    assert isinstance(spec, TensorSpec)
    return _Row(spec.name, "a tensor for each task", math.prod(spec.shape), added)


def _factors(spec: FactoredSpec) -> str:
    return "factors, as few as a task needs" if spec.rank.prune else "factors"

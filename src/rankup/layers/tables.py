"""Tables with rows for all tasks, and where in a factored layer's tables the factors are that a
task selects from."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankup.layers.tensors import ALIGNED

# The indices of the tasks that a task selects from, in its own order; None for all before it.
Selection = tuple[int, ...] | None
Span = tuple[int, int]  # of rows of a table
Block = tuple[Tensor, Tensor, Tensor]  # U [R, out], V [R, in], selector [R]


def read_tables(buffers: Mapping[str, Any]) -> tuple[Any, ...]:
    """U, V, S, B and the kept weight. Attributes of a module would take longer to read, and an
    `itemgetter` cannot be traced by torch.compile."""
    return buffers["U"], buffers["V"], buffers["S"], buffers["B"], buffers["base_weight"]


class Tables(NamedTuple):
    """A layer's tables as a mixed batch reads them. If another thread commits a task, all are from
    before or all from after that."""

    U: Tensor
    V: Tensor
    S: Tensor
    B: Tensor
    base: Tensor | None


def after_removal(selection: Selection, task: int) -> Selection:
    """A selection once a task that is not in it has been removed."""
    return None if selection is None else tuple(i - (i > task) for i in selection)


def spans_of(ends: Sequence[int], selection: Selection, own: int | None = None) -> list[Span]:
    """Where in the tables the factors are that a task selects from, with adjacent spans joined.

    Args:
        ends: as in `FactoredLayer`.
        own: the task's index, to include its own factors.

    >>> spans_of([2, 5, 6, 9], selection=(0, 2))  # two seeded factors, then three tasks' own
    [(0, 5), (6, 9)]
    """
    if selection is None:
        return [(0, ends[-1] if own is None else ends[own + 1])]
    spans = [(0, ends[0])]
    for task in selection if own is None else (*selection, own):
        start, end = ends[task : task + 2]
        if start == spans[-1][1]:
            spans[-1] = spans[-1][0], end
        else:
            spans.append((start, end))
    return [span for span in spans if span[0] < span[1]] or [(0, 0)]


def rows_of(table: Tensor, spans: Sequence[Span]) -> Tensor:
    """The rows of these spans in one tensor, at an aligned address."""
    if len(spans) == 1:
        return aligned_rows(table, *spans[0])
    return torch.cat([table[start:end] for start, end in spans])


def cut_out(table: Tensor, start: int, end: int) -> Tensor:
    """The table without rows `start` to `end`."""
    return torch.cat([table[:start], table[end:]])


def without_row(table: Tensor, index: int) -> Tensor:
    return cut_out(table, index, index + 1)


def aligned_rows(table: Tensor, start: int, end: int) -> Tensor:
    """Rows `start` to `end`, copied if they do not begin at an aligned address: products may have
    other bits there."""
    rows = table[start:end]
    offset = start * table.stride(0) * table.element_size() if start else 0
    return rows.clone() if offset % ALIGNED else rows

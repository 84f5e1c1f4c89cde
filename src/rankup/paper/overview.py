"""What has been run of each table and figure, what is left, and how long both take."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from rankup.paper import PARTS, part
from rankup.paper.experiment import TASKS, Cell
from rankup.paper.results import Result, Results
from rankup.report.text import duration

if TYPE_CHECKING:
    from rich.table import Table

# Seconds per seed, task and epoch, by stream and network.
Pace = Mapping[tuple[str, str], float]


class Share(NamedTuple):
    """How much of some cells is done."""

    done: int
    of: int
    spent: float  # seconds
    left: float | None  # estimated seconds; None if nothing like it has been run


@dataclass(frozen=True)
class _ReadOnce(Results):
    """Results whose files are read only once, however many tables show them."""

    _read: dict[Cell, dict[int, Result]] = field(default_factory=dict)

    def _found(self, cell: Cell) -> dict[int, Result]:
        if cell not in self._read:
            self._read[cell] = super()._found(cell)
        return self._read[cell]


def share_of(cells: Sequence[Cell], results: Results, pace: Pace) -> Share:
    missing = {cell: len(results.missing(cell)) for cell in cells}
    left: float | None = 0.0
    for cell, seeds in missing.items():
        rate = pace.get((cell.stream, cell.net))
        if seeds:
            steps = seeds * (cell.tasks or TASKS) * cell.epochs
            left = None if left is None or rate is None else left + steps * rate
    spent = sum(run.seconds for cell in cells if (found := results.of(cell)) for run in found.runs)
    return Share(sum(not seeds for seeds in missing.values()), len(cells), spent, left)


def pace_of(cells: Iterable[Cell], results: Results, device: str) -> Pace:
    """Seconds per seed, task and epoch, by stream and network: the median of what was run on such
    a device, as some methods take several times as long as others."""
    rates: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        found = results.of(cell)
        spent = [r.seconds for r in found.runs if r.config.get("device") == device] if found else []
        if spent:
            seconds = statistics.mean(spent) / ((cell.tasks or TASKS) * cell.epochs)
            rates.setdefault((cell.stream, cell.net), []).append(seconds)
    return {case: statistics.median(found) for case, found in rates.items()}


def overview(results: Results, device: str) -> Table:
    """A table for the terminal: a line for each part, and one for all of them, which counts runs
    that several parts share only once."""
    from rich import box
    from rich.table import Table

    results = _ReadOnce(results.root)
    parts = {name: part(name).cells() for name in PARTS}
    each_once = list(dict.fromkeys(cell for cells in parts.values() for cell in cells))
    pace = pace_of(each_once, results, device)
    table = Table("name", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("what", overflow="fold")
    for heading in ("done", "time", "left, about"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, cells in parts.items():
        table.add_row(name, PARTS[name].help, *_said(share_of(cells, results, pace)))
    table.add_section()
    table.add_row("all", "each run counted once", *_said(share_of(each_once, results, pace)))
    return table


def _said(share: Share) -> tuple[str, str, str]:
    spent, left = (
        "?" if seconds is None else duration(seconds) if seconds else "–"
        for seconds in (share.spent, share.left)
    )
    return f"{share.done} of {share.of}", spent, left

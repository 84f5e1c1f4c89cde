"""A table of the paper: what is measured for each of its numbers, and what the paper prints there.
It can be shown even if not all of it was run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote

from rankup.paper.experiment import Cell
from rankup.paper.results import Measured, Results
from rankup.report.text import NOTHING, signed, spread

if TYPE_CHECKING:
    from rich.table import Table as RichTable

NOT_RUN = "not run"
FAILED = "failed"


@dataclass(frozen=True)
class Tasks:
    """Accuracy on tasks `first` to `last`, counted from 1, after all tasks were learned."""

    first: int
    last: int


Measure = Literal["accuracy", "forgetting", "parameters", "buffer"] | Tasks
_HEADINGS = {
    "accuracy": "accuracy %",
    "forgetting": "forgetting %",
    "parameters": "parameters",
    "buffer": "replay buffer",
}


@dataclass(frozen=True)
class Row:
    """A line of a table: a cell, and what the paper prints for each measure, None for nothing."""

    name: str
    cell: Cell
    printed: Sequence[float | None]
    seeds: int | None = None  # show only this many, to compare with rows of as many

    @property
    def shown(self) -> Cell:
        return replace(self.cell, seeds=self.seeds) if self.seeds else self.cell


@dataclass(frozen=True)
class Section:
    """Rows that belong together in a table, such as all that were measured on one stream."""

    title: str
    measures: Sequence[Measure]
    rows: Sequence[Row]


@dataclass(frozen=True)
class Table:
    """A table of the paper."""

    title: str
    sections: Sequence[Section]
    differs: str = ""  # how our protocol differs from the paper's

    def cells(self) -> list[Cell]:
        """All cells that have to be run for it, each once."""
        return list(dict.fromkeys(row.cell for part in self.sections for row in part.rows))


def lines(
    section: Section, results: Results, name: Callable[[Row], str] = lambda row: row.name
) -> Iterator[list[str]]:
    """A section's lines as text, the heading first: a measure is followed by the paper's figure and
    the difference, if the paper prints any for it."""
    printed = [
        any(row.printed[number] is not None for row in section.rows)
        for number in range(len(section.measures))
    ]
    heading = [section.title]
    for measure, has in zip(section.measures, printed, strict=True):
        heading += [_heading(measure), *(["paper", "diff"] if has else [])]
    yield heading
    for row in section.rows:
        measured = results.of(row.shown)
        line = [name(row) + _seeds(row.shown, measured)]
        for measure, said, has in zip(section.measures, row.printed, printed, strict=True):
            line.append(_value(measure, measured, row.shown, results))
            if has:
                line += [_printed(measure, said), _difference(measure, measured, said)]
        yield line


def rich_tables(table: Table, results: Results) -> Iterable[RichTable]:
    """Tables for the terminal, one for each section."""
    from rich import box
    from rich.table import Table as RichTable

    for section in table.sections:
        (stream, *headings), *rest = lines(section, results)
        title = f"{table.title}: {stream}"
        shown = RichTable(box=box.SIMPLE_HEAD, title=title, collapse_padding=True, pad_edge=False)
        shown.add_column(overflow="fold")
        for name in headings:  # numbers are never cut: a narrow terminal folds names
            shown.add_column(name, justify="right", no_wrap=True)
        for line in rest:
            shown.add_row(*line)
        yield shown


def markdown(table: Table, results: Results, page: Path) -> str:
    """All sections, each under its stream's name. Names of finished cells link to the raw numbers,
    relative to where `page` will be."""

    def linked(row: Row) -> str:
        if results.of(row.cell) is None:
            return row.name
        return f"[{row.name}]({quote(relpath(results.path(row.cell), page.parent))})"

    parts = []
    for section in table.sections:
        heading, *rest = lines(section, results, linked)
        rule = ["---"] + ["---:"] * (len(heading) - 1)
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in (heading, rule, *rest)))
    return "\n\n".join(parts)


def _value(measure: Measure, measured: Measured | None, cell: Cell, results: Results) -> str:
    if measured is None:
        return FAILED if results.failures(cell) else NOT_RUN
    if measure in ("parameters", "buffer"):
        return f"{getattr(measured, measure):,.0f}"
    return spread(_fractions(measure, measured))


def _heading(measure: Measure) -> str:
    if isinstance(measure, Tasks):
        return f"tasks {measure.first}–{measure.last}"
    return _HEADINGS[measure]


def _fractions(measure: Measure, measured: Measured) -> list[float]:
    """The measure's value for each seed."""
    if isinstance(measure, Tasks):
        rows = (run.accuracy[-1][measure.first - 1 : measure.last] for run in measured.runs)
        return [statistics.mean(row) for row in rows]
    found: list[float] = getattr(measured, measure)
    return found


def _printed(measure: Measure, said: float | None) -> str:
    if said is None:
        return NOTHING
    return f"{said:g}M" if measure in ("parameters", "buffer") else f"{said:g}"


def _difference(measure: Measure, measured: Measured | None, said: float | None) -> str:
    if measured is None or said is None:
        return NOTHING
    if measure in ("parameters", "buffer"):
        return signed(getattr(measured, measure) / 1e6 - said) + "M"
    return signed(100 * statistics.mean(_fractions(measure, measured)) - said)


def _seeds(cell: Cell, measured: Measured | None) -> str:
    """A mark if fewer seeds were run than wanted."""
    if measured is None or len(measured.runs) == cell.seeds:
        return ""
    return f" ({len(measured.runs)} of {cell.seeds} seeds)"

"""Tables of the paper: what is measured for each number, what the paper prints there, and how a
table is shown, even if not all of it was run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote

from rankup.errors import RankupError
from rankup.paper.experiment import Experiment
from rankup.paper.results import Measured, Results
from rankup.report.text import NOTHING, signed
from rankup.runs.read import spread

if TYPE_CHECKING:
    from rich.table import Table as RichTable

NOT_RUN = "not run"
FAILED = "failed"


@dataclass(frozen=True)
class Tasks:
    """Accuracy on tasks `first` to `last`, counted from 1, after all tasks were learned."""

    first: int
    last: int


Share = Literal["accuracy", "forgetting", "untold", "guessed"]  # of right answers
Size = Literal["parameters", "buffer"]
Cost = Literal["bytes", "minutes", "answer"]
Measure = Share | Size | Cost | Literal["against"] | Tasks
_HEADINGS = {
    "accuracy": "accuracy %",
    "forgetting": "forgetting %",
    "untold": "untold %",
    "guessed": "task guessed %",
    "parameters": "parameters",
    "buffer": "replay buffer",
    "bytes": "bytes stored",
    "minutes": "minutes of training",
    "answer": "ms per answer",
    "against": "against our best",
}
_DIGITS = {"bytes": 0, "minutes": 2, "answer": 3}  # after the point


@dataclass(frozen=True)
class Row:
    """A line of a table: an experiment, None for a line of printed values alone, and the paper's
    value of each measure, None for nothing."""

    name: str
    experiment: Experiment | None
    paper_values: Sequence[float | None]
    seeds: int | None = None  # show only this many, to compare with rows of as many
    # What must be run first, to choose the row's settings by. Until then it has no experiment.
    trials: Sequence[Experiment] = ()
    # Until then: as large ones as are still to come, to estimate their time by.
    stand_ins: Sequence[Experiment] = ()

    @property
    def shown(self) -> Experiment | None:
        if self.experiment is None or not self.seeds:
            return self.experiment
        return replace(self.experiment, seeds=self.seeds)


@dataclass(frozen=True)
class Section:
    """Rows that belong together in a table, such as all that were measured on one stream."""

    title: str
    measures: Sequence[Measure]
    rows: Sequence[Row]
    best: Experiment | None = None  # what "against" compares with


@dataclass(frozen=True)
class Table:
    """A table of the paper."""

    title: str
    sections: Sequence[Section]
    differs: str = ""  # how our protocol differs from the paper's

    def given(self, results: Results) -> Table:
        """The table with what earlier results decide, such as settings chosen by trials."""
        return self

    def stand_ins(self) -> list[Experiment]:
        """In place of experiments whose settings are not chosen yet: others of their size."""
        rows = [row for section in self.sections for row in section.rows]
        return [each for row in rows if not row.experiment for each in row.stand_ins]

    def experiments(self) -> list[Experiment]:
        """All experiments that have to be run for it, each once, trials first."""
        rows = [row for section in self.sections for row in section.rows]
        trials = [trial for row in rows for trial in row.trials]
        shown = [row.experiment for row in rows if row.experiment is not None]
        return list(dict.fromkeys([*trials, *shown]))


def lines(
    section: Section, results: Results, name: Callable[[Row], str] = lambda row: row.name
) -> Iterator[list[str]]:
    """A section's lines as text, the heading first: a measure is followed by the paper's value and
    the difference, if the paper prints any for it."""
    has_values = [
        any(row.paper_values[number] is not None for row in section.rows)
        for number in range(len(section.measures))
    ]
    heading = [section.title]
    for measure, has in zip(section.measures, has_values, strict=True):
        heading += [_heading(measure), *(["paper", "diff"] if has else [])]
    yield heading
    for row in section.rows:
        measured = None if row.shown is None else results.of(row.shown)
        line = [name(row) + _seeds(row.shown, measured)]
        columns = zip(section.measures, row.paper_values, has_values, strict=True)
        for measure, value, has in columns:
            line.append(_ours(measure, measured, row, section.best, results))
            if has:
                line += [_paper_value(measure, value), _difference(measure, measured, value)]
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
    """All sections, each under its stream's name. Names of what was run link to the raw numbers,
    relative to where `page` will be."""

    def linked(row: Row) -> str:
        if row.experiment is None or results.of(row.experiment) is None:
            return row.name
        return f"[{row.name}]({quote(relpath(results.path(row.experiment), page.parent))})"

    sections = []
    for section in table.sections:
        heading, *rest = lines(section, results, linked)
        rule = ["---"] + ["---:"] * (len(heading) - 1)
        sections.append("\n".join(f"| {' | '.join(line)} |" for line in (heading, rule, *rest)))
    return "\n\n".join(sections)


def _ours(
    measure: Measure,
    measured: Measured | None,
    row: Row,
    best: Experiment | None,
    results: Results,
) -> str:
    if row.shown is None:
        return _not_chosen(row, results)
    if measured is None:
        return FAILED if results.failures(row.shown) else NOT_RUN
    if measure in ("parameters", "buffer"):
        return f"{getattr(measured, measure):,.0f}"
    if measure in ("bytes", "minutes", "answer"):
        value = _cost(measure, measured)
        return NOTHING if value is None else f"{value:,.{_DIGITS[measure]}f}"
    if measure == "against":
        reference = None if best in (None, row.shown) else results.of(best)
        return NOTHING if reference is None else paired(measured, reference)
    return spread(_fractions(measure, measured))


def _not_chosen(row: Row, results: Results) -> str:
    """Of a line of printed values, or one whose settings no trial has chosen."""
    if not row.trials:
        return NOTHING
    return NOT_RUN if any(results.missing(trial) for trial in row.trials) else FAILED


def _cost(measure: Cost, measured: Measured) -> float | None:
    if measure == "answer":
        return statistics.mean(measured.answers) if measured.answers else None
    return measured.bytes if measure == "bytes" else measured.seconds / 60


def paired(measured: Measured, reference: Measured) -> str:
    """The mean difference in points over the seeds that both have, with its standard error, which
    two seeds or more have."""
    one, other = measured.by_seed, reference.by_seed
    points = [100 * (one[seed] - other[seed]) for seed in one.keys() & other.keys()]
    if not points:
        return NOTHING
    if len(points) == 1:
        return signed(points[0])
    error = statistics.stdev(points) / math.sqrt(len(points))
    return f"{signed(statistics.mean(points))} ± {error:.2f}"


def _heading(measure: Measure) -> str:
    if isinstance(measure, Tasks):
        return f"tasks {measure.first}–{measure.last}"
    return _HEADINGS[measure]


def _fractions(measure: Measure, measured: Measured) -> list[float]:
    """The measure's value for each seed."""
    if isinstance(measure, Tasks):
        rows = (run.accuracy[-1][measure.first - 1 : measure.last] for run in measured.runs)
        return [statistics.mean(row) for row in rows]
    fractions: list[float] = getattr(measured, measure)
    if not fractions:
        raise RankupError(f"a result has no {_heading(measure)}: it was run without it")
    return fractions


def _paper_value(measure: Measure, value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:g}M" if measure in ("parameters", "buffer") else f"{value:g}"


def _difference(measure: Measure, measured: Measured | None, value: float | None) -> str:
    if measured is None or value is None:
        return NOTHING
    if measure in ("parameters", "buffer"):
        return signed(getattr(measured, measure) / 1e6 - value) + "M"
    return signed(100 * statistics.mean(_fractions(measure, measured)) - value)


def _seeds(experiment: Experiment | None, measured: Measured | None) -> str:
    """A mark if fewer seeds were run than wanted."""
    if experiment is None or measured is None or len(measured.runs) == experiment.seeds:
        return ""
    return f" ({len(measured.runs)} of {experiment.seeds} seeds)"

"""An overview of all tables and figures: what was run, what is left, and how long both take."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from rankup.paper import PARTS, experiments_of, part
from rankup.paper.experiment import Experiment
from rankup.paper.results import Result, Results
from rankup.report.text import duration

if TYPE_CHECKING:
    from rich.table import Table

# Seconds per seed, task and epoch, by stream and network.
Pace = Mapping[tuple[str, str], float]


class Share(NamedTuple):
    """How much of some experiments is done."""

    done: int
    of: int
    spent: float  # seconds
    left: float | None  # estimated seconds; None if nothing like it has been run


@dataclass(frozen=True)
class _ReadOnce(Results):
    """Results whose files are read only once, however many tables show them."""

    _files: dict[Experiment, dict[int, Result]] = field(default_factory=dict)

    def _read(self, experiment: Experiment) -> dict[int, Result]:
        if experiment not in self._files:
            self._files[experiment] = super()._read(experiment)
        return self._files[experiment]


def share_of(experiments: Sequence[Experiment], results: Results, pace: Pace) -> Share:
    missing = {experiment: len(results.missing(experiment)) for experiment in experiments}
    left: float | None = 0.0
    for experiment, seeds in missing.items():
        rate = pace.get((experiment.stream, experiment.net))
        if seeds:
            steps = seeds * experiment.learned * experiment.epochs
            left = None if left is None or rate is None else left + steps * rate
    measured = [results.of(experiment) for experiment in experiments]
    spent = sum(run.seconds for each in measured if each for run in each.runs)
    return Share(sum(not seeds for seeds in missing.values()), len(experiments), spent, left)


def pace_of(experiments: Iterable[Experiment], results: Results, device: str) -> Pace:
    """Seconds per seed, task and epoch, by stream and network: the median of what was run on such
    a device, as some methods take several times as long as others."""
    rates: dict[tuple[str, str], list[float]] = {}
    for experiment in experiments:
        measured = results.of(experiment)
        runs = measured.runs if measured else []
        if spent := [run.seconds for run in runs if run.config.get("device") == device]:
            seconds = statistics.mean(spent) / (experiment.learned * experiment.epochs)
            rates.setdefault((experiment.stream, experiment.net), []).append(seconds)
    return {case: statistics.median(seconds) for case, seconds in rates.items()}


def overview(results: Results, device: str) -> Table:
    """A table for the terminal: a line for each part, and one for all of them, which counts runs
    that several parts share only once."""
    from rich import box
    from rich.table import Table

    results = _ReadOnce(results.root)
    parts = {name: part(name).given(results) for name in PARTS}
    each_once = experiments_of(parts.values())
    pace = pace_of(each_once, results, device)
    table = Table("name", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("what", overflow="fold")
    for heading in ("done", "time", "left, about"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, shown in parts.items():
        share = share_of(shown.experiments(), results, pace)
        table.add_row(name, PARTS[name].help, *_cells(share))
    table.add_section()
    whole = share_of(each_once, results, pace)
    table.add_row("all", "each run counted once", *_cells(whole))
    if whole.left is None:
        table.caption = f"?: nothing like it was run on a {device}; --left judges by others"
    return table


def _cells(share: Share) -> tuple[str, str, str]:
    spent, left = (
        "?" if seconds is None else duration(seconds) if seconds else "–"
        for seconds in (share.spent, share.left)
    )
    return f"{share.done:,} of {share.of:,}", spent, left

"""How long what is left of tables will take, judged by the runs that there are."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rankup.paper.experiment import Experiment
from rankup.paper.results import Result, Results
from rankup.paper.runner import at_once

# Seconds per task and epoch of an experiment of five seeds, by what it is: the whole, and without
# the method for those that were never run.
Pace = Mapping[tuple[object, ...], float]


class Minutes(NamedTuple):
    all: float
    longest: float  # of one setting, beside others


class Left(NamedTuple):
    """What is left to run on one stream, network and width."""

    case: str
    trials: int
    others: int
    time: Minutes | None  # None: nothing like it was run

    def __str__(self) -> str:
        what = (
            f"{self.trials} trials, {self.others} others" if self.trials else f"{self.others} left"
        )
        left = f"{self.case}: {what}"
        if self.time is None:
            return f"{left}; nothing to judge their time by"
        return f"{left}; about {self.time.all:.0f} min, {self.time.longest:.1f} for the longest"


def main_machine(experiments: Iterable[Experiment], results: Results) -> str | None:
    """Where most runs were made."""
    count = Counter(run.machine for each in experiments for run in _runs(each, results))
    return count.most_common(1)[0][0] if count else None


def pace_on(machine: str, experiments: Iterable[Experiment], results: Results) -> Pace:
    """How fast experiments are there, as they were run: medians, because some ran beside others."""
    found: dict[tuple[object, ...], list[float]] = {}
    for experiment in experiments:
        runs = [run for run in _runs(experiment, results) if run.machine == machine]
        if runs:
            seconds = sum(run.seconds for run in runs) / (
                experiment.learned * experiment.epochs * _load(len(runs))
            )
            for key in _keys(experiment):
                found.setdefault(key, []).append(seconds)
    return {key: statistics.median(seconds) for key, seconds in found.items()}


def left_of(
    experiments: Sequence[Experiment], results: Results, pace: Pace, jobs: int
) -> list[Left]:
    """What is left to run of these, by stream, network and width, with so many at once."""
    cases: dict[str, list[Experiment]] = {}
    for experiment in experiments:
        if results.missing(experiment):
            width = f", width {experiment.width}" if experiment.width else ""
            cases.setdefault(f"{experiment.stream}, {experiment.net}{width}", []).append(experiment)
    return [
        Left(
            case,
            sum(each.held_out is not None for each in some),
            sum(each.held_out is None for each in some),
            _minutes(some, results, pace, jobs),
        )
        for case, some in cases.items()
    ]


def _minutes(
    experiments: Sequence[Experiment], results: Results, pace: Pace, jobs: int
) -> Minutes | None:
    total = longest = 0.0
    for experiment in experiments:
        rate = next((pace[key] for key in _keys(experiment) if key in pace), None)
        if rate is None:
            return None
        seeds = len(results.missing(experiment))
        seconds = rate * experiment.learned * experiment.epochs * _load(seeds)
        total, longest = total + seconds / at_once(experiment, jobs), max(longest, seconds)
    return Minutes(max(total, longest) / 60, longest / 60)


def _keys(experiment: Experiment) -> list[tuple[object, ...]]:
    """From the most to the least alike."""
    case = experiment.stream, experiment.net
    return [(*case, experiment.method, bool(experiment.seeded)), case]


def _load(seeds: int) -> float:
    """Seeds are trained together: one takes about half as long as five."""
    return (4 + seeds) / 9


def _runs(experiment: Experiment, results: Results) -> list[Result]:
    measured = results.of(experiment)
    return measured.runs if measured else []

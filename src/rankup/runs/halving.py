"""Successive halving, for `rankup tune --search asha`: all trials learn the first tasks, the best
of them the next ones, and a few all tasks, within a budget of epochs.

Optuna orders the trials and decides which continue. Between its decisions these learn together, as
trials of a grid do, so that the choice does not depend on which one is done first. The first
decision comes as late as the budget allows, because in the first task nothing can be forgotten, and
settings against forgetting make no difference.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import accumulate
from statistics import mean
from typing import TYPE_CHECKING

from rankup.errors import RankupError
from rankup.methods import method_class
from rankup.metrics import AccuracyMatrix
from rankup.runs.records import read_lines
from rankup.runs.seed_run import SeedRun

if TYPE_CHECKING:
    from optuna import Trial

_REDUCTION = 3  # the best 1/3 of trials continue, until they have learned 3 times as many tasks
_COMPLETE = 2  # trials that the budget must allow to learn all tasks, after the first decision

Trials = Sequence[Sequence[SeedRun]]  # for each trial a run per seed
Learn = Callable[[list[SeedRun]], Mapping[SeedRun, str]]


def check_optuna() -> None:
    if find_spec("optuna") is None:
        raise RankupError("--search asha needs Optuna: pip install 'rankup[ray]'")


class Halving:
    """Trials of one method, which learn until they are stopped.

    Args:
        trials: the trials.
        budget: the number of epochs for all trials, tasks and seeds together.
        seed: the seed of the order of trials, which matters for those that are equally good, and
            if the budget is too small to begin all.
        learn: a function that lets runs learn as many tasks as their `until` says, and returns why
            any failed.

    Attributes:
        learned: how many tasks each trial has learned.
        failures: why any runs failed.
    """

    def __init__(self, trials: Trials, budget: int, seed: int, learn: Learn) -> None:
        self.trials, self.left, self._learn_runs = trials, budget, learn
        self.learned, self._scores = [0] * len(trials), [0.0] * len(trials)
        self.failures: dict[SeedRun, str] = {}
        self._first = _first_decision(trials, budget)
        self._optuna_trials = _optuna_trials(len(trials), seed, self._first)

    def run(self) -> None:
        """Run the trials until the best have learned all tasks or the budget is spent."""
        config = self.trials[0][0].config
        going = [*self._optuna_trials]
        for until in rungs(config.tasks, self._first):
            rests = (_epochs(self.trials[number], config.tasks - until) for number in going)
            rest = max(rests, default=0)
            afforded = self._affordable(going, until, rest)  # which leaves enough for the best
            succeeded = self._learn(sorted(afforded, key=[*self._optuna_trials].index), until)
            going = self._best_first(n for n in succeeded if self._goes_on(n))
        # If all trials that continued have failed, the best of the others continue, one by one.
        while config.tasks not in self.learned and (others := self._best_first(self._stopped())):
            if not self._affordable(others, config.tasks):
                return
            self._learn(others[:1], config.tasks)

    def _learn(self, numbers: Sequence[int], until: int) -> list[int]:
        """Let trials learn `until` that many tasks; return those that did not fail."""
        self.left -= sum(self._cost(number, until) for number in numbers)
        sent = {
            replace(run, resume=run.resume or self.learned[number] > 0, until=until): run
            for number in numbers
            for run in self.trials[number]
        }
        unfinished = [run for run in sent if run.unfinished]
        failed = self._learn_runs(unfinished) if unfinished else {}
        self.failures |= {sent[run]: why for run, why in failed.items()}
        succeeded = [number for number in numbers if not self.has_failed(number)]
        for number in succeeded:
            matrices = [matrix_after(run, until) for run in self.trials[number]]
            self.learned[number] = until
            self._scores[number] = mean(matrix.average_accuracy() for matrix in matrices)
        return succeeded

    def _goes_on(self, number: int) -> bool:
        self._optuna_trials[number].report(self._scores[number], self.learned[number])
        return not self._optuna_trials[number].should_prune()

    def has_failed(self, number: int) -> bool:
        return any(run in self.failures for run in self.trials[number])

    def _stopped(self) -> list[int]:
        return [number for number in self._optuna_trials if not self.has_failed(number)]

    def _best_first(self, numbers: Iterable[int]) -> list[int]:
        return sorted(numbers, key=lambda n: (self.learned[n], self._scores[n]), reverse=True)

    def _cost(self, number: int, until: int) -> int:
        return _epochs(self.trials[number], until - self.learned[number])

    def _affordable(self, numbers: Sequence[int], until: int, rest: int = 0) -> list[int]:
        """The first of these trials that the budget allows to learn `until` that many tasks, if
        `rest` epochs are to be left."""
        costs = accumulate(self._cost(number, until) for number in numbers)
        return [n for n, cost in zip(numbers, costs, strict=True) if cost + rest <= self.left]


def rungs(tasks: int, first: int) -> list[int]:
    """After how many tasks it is decided which trials continue; the last entry is their end.

    >>> rungs(10, first=1), rungs(10, first=4), rungs(10, first=10)
    ([1, 3, 9, 10], [4, 10], [10])
    """
    later = (first * _REDUCTION**power for power in range(tasks))
    return [*(count for count in later if count < tasks), tasks]


def _first_decision(trials: Trials, budget: int) -> int:
    """After how many tasks the first decision is made: the most that all trials can learn if the
    budget must allow a few to learn the rest."""
    config = trials[0][0].config
    if method_class(config.method).learns_all_at_once:
        return config.tasks
    for first in range(config.tasks - 1, 1, -1):
        begun = sum(_epochs(runs, first) for runs in trials)
        rest = max(_epochs(runs, config.tasks - first) for runs in trials)
        if begun + _COMPLETE * rest <= budget:
            return first
    return 1


def matrix_after(run: SeedRun, tasks: int) -> AccuracyMatrix:
    """The accuracy of a run after so many tasks, even if it has learned more since."""
    return AccuracyMatrix([line["accuracy"] for line in read_lines(run.folder)[:tasks]])


def whole_cost(trials: Trials) -> list[int]:
    """The number of epochs that each trial takes to learn all tasks."""
    return [_epochs(runs, runs[0].config.tasks) for runs in trials]


def _epochs(runs: Sequence[SeedRun], tasks: int) -> int:
    return tasks * sum(int(run.config.recipe["epochs"]) for run in runs)


def _optuna_trials(count: int, seed: int, first: int) -> "dict[int, Trial]":
    """Optuna's trials by their number in the grid, in the order in which it begins them. They are
    never reported as ended: the study is dropped with them, and the sampler would stop Optuna's
    own loop, which is not used."""
    from optuna import create_study, logging
    from optuna.pruners import SuccessiveHalvingPruner
    from optuna.samplers import GridSampler

    logging.set_verbosity(logging.WARNING)
    numbers = [*range(count)]
    study = create_study(
        direction="maximize",
        sampler=GridSampler({"number": numbers}, seed=seed),
        pruner=SuccessiveHalvingPruner(min_resource=first, reduction_factor=_REDUCTION),
    )
    asked = [study.ask() for _ in numbers]
    return {trial.suggest_categorical("number", numbers): trial for trial in asked}

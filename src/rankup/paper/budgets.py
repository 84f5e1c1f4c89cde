"""The table at equal budgets: rivals with the epochs, width, augmentation and schedule of our best,
each with settings chosen by as many trials on held-out training data at that budget."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from rankup.methods.info import Values, axis
from rankup.methods.registry import METHODS, method_info
from rankup.methods.search import TRIALS, trials
from rankup.methods.settings import tried_before
from rankup.paper import paper_values
from rankup.paper.experiment import COMPLETE, TASKS, Experiment
from rankup.paper.results import Results
from rankup.paper.tables import Measure, Row, Section, Table

HELD_OUT = 0.15
MEASURES: tuple[Measure, ...] = ("accuracy", "bytes", "minutes", "answer", "against")
SEEDED, BOTH = "rank, seeded", "rank, both"  # factors
RIVALS = ("packnet", "supsup", "hat", "ibpwf", "wsn", "gpm", "der", "vera", "randlora")
# Every task learns a mask, scales or a network of its own and leaves nothing to later ones that
# they could run out of: the first tasks tell which settings are best. Finals of all others learn
# more of the stream, as a few tasks would reward those that fill the network early.
_APART = ("supsup", "parallel", "vera", "randlora")
_FIRST = 5  # tasks
FINALISTS = 3
# Seeded factors have no first length to choose, but more decay; around what was best so far. Each
# is a byte, as in all our best rows.
_DECAYS = axis("weight_decay", 0.0, 0.05, 0.1, 0.2)
_MNIST_RATES, _OTHER_RATES = axis("lr", 1e-2, 2e-2, 4e-2), axis("lr", 2.5e-3, 5e-3, 1e-2)

_NOTE = (
    "All rows of a table have the same epochs, width, augmentation and schedule. Every row's "
    f"settings are the best of {FINALISTS} trials with that budget, on {HELD_OUT:.0%} of the "
    "training data, held out, and a seed that no row has; these are the best of twelve with fewer "
    "epochs. 'Against our best' is the mean difference in "
    "points over the same seeds, with its standard error; our best is 'rank, seeded', with "
    "ResNet18 'rank, both', as in the other tables. Minutes are a seed's, with whatever shared the "
    "GPU; an answer is the fastest of 30 to a batch of 256. Multitask has all tasks at once: a "
    "bound, not continual."
)


@dataclass(frozen=True)
class Budget:
    """What all rows of a table have in common: on one stream, one network of one width."""

    stream: str
    net: str
    width: int
    epochs: int
    seeded: str  # factors of our row that has no others
    given: Mapping[str, Any] = field(default_factory=dict)  # fields of the recipe
    seeds: int = 5
    tasks: int | None = None
    final: int | None = None  # how many tasks trials with all epochs learn, if not all

    @property
    def heat_epochs(self) -> int:
        """Of the trials that leave few settings."""
        return min(self.epochs, max(5, self.epochs // 8))

    @property
    def pair(self) -> str:
        """The stream and the network, as part of a file's name."""
        return f"{self.stream}-{self.net}"

    @property
    def title(self) -> str:
        return f"{for_people(self.pair)} of width {self.width}, {self.epochs} epochs"

    @property
    def our_best(self) -> str:
        """The row of ours that was best on held-out data before there were others to compare."""
        return BOTH if self.net == "resnet18" else SEEDED


def for_people(pair: str) -> str:
    """
    >>> for_people("p-mnist-mlp")
    'P-MNIST, MLP'
    """
    stream, _, net = pair.rpartition("-")
    return f"{paper_values.STREAMS.get(stream, stream)}, {'MLP' if net == 'mlp' else 'ResNet18'}"


_MNIST = "12288,6000"
_SHIFTED = {"crop": 12}
BUDGETS = (
    Budget("p-mnist", "mlp", 256, 20, _MNIST),
    Budget("p-mnist", "mlp", 1024, 20, _MNIST),
    Budget("r-mnist", "mlp", 256, 20, _MNIST),
    Budget("r-mnist", "mlp", 1024, 20, _MNIST),
    Budget("s-cifar100", "mlp", 256, 60, "26624,5000"),
    Budget("s-cifar100", "mlp", 1024, 60, "20480,4224"),
    Budget("s-miniimagenet", "mlp", 256, 60, "32768,8192", _SHIFTED),
    Budget("s-miniimagenet", "mlp", 1024, 60, "32768,8192", _SHIFTED),
    Budget("s-cifar100", "resnet18", 32, 80, "48x", seeds=3, final=10),
    Budget("s-miniimagenet", "resnet18", 32, 80, "48x", seeds=3, final=10),
)


@dataclass(frozen=True)
class Contender:
    """A method at a budget, and the settings that are tried for it, in two rounds: in heats all of
    them with few epochs on the first tasks, in finals the best few with the budget's epochs.

    Args:
        scores: the settings' accuracies on held-out data, None for those that failed, if they were
            tried before: then there are no heats.
    """

    budget: Budget
    name: str
    method: str
    tried: Sequence[Values]
    rank: str | None = None
    seeded: str | None = None
    scores: Sequence[float | None] | None = None

    def heats(self) -> list[Experiment]:
        if self.scores is not None or len(self.tried) <= FINALISTS:
            return []
        return [
            self._trial({**tried, "epochs": self.budget.heat_epochs}, _FIRST)
            for tried in self.tried
        ]

    def finalists(self, results: Results | None) -> list[Values] | None:
        """The settings of the finals; None until the heats were run."""
        if len(self.tried) <= FINALISTS:
            return [*self.tried]
        scores = self.scores
        if scores is None:
            heats = self.heats()
            if results is None or any(results.missing(heat) for heat in heats):
                return None
            scores = [_score(heat, results) for heat in heats]
        ended = [number for number, score in enumerate(scores) if score is not None]
        best = sorted(ended, key=lambda number: -(scores[number] or 0))
        return [self.tried[number] for number in best[:FINALISTS]]

    def finals(self, finalists: Sequence[Values]) -> list[Experiment]:
        """One seed for each of the settings."""
        apart = self.method in _APART or self.rank == "0,0"
        return [self._trial(tried, _FIRST if apart else self.budget.final) for tried in finalists]

    def row(self, results: Results | None) -> Row:
        """A line of the table; without an experiment while its trials are not done."""
        finalists = self.finalists(results)
        finals, shown = self.finals(finalists or []), None
        if results is not None and (best := best_of(finals, results)):
            shown = self._shown((finalists or [])[finals.index(best)])
        stand_ins = [self._shown(self.tried[0])]
        if finalists is None:
            stand_ins += self.finals(self.tried[:FINALISTS])
        nothing = [None] * len(MEASURES)
        trials = [*self.heats(), *finals]
        return Row(self.name, shown, nothing, trials=trials, stand_ins=stand_ins)

    def _trial(self, values: Values, first: int | None) -> Experiment:
        most = self.budget.tasks or TASKS
        first = None if first is None or first >= most else first
        return self._experiment(values, seeds=1, held_out=HELD_OUT, first=first)

    def _shown(self, values: Values) -> Experiment:
        return self._experiment(values, seeds=self.budget.seeds, timed=True)

    def _experiment(self, values: Values, **fields: Any) -> Experiment:
        budget = self.budget
        settings = {
            **budget.given,
            "epochs": budget.epochs,
            **method_info(self.method).recipe,
            "schedule": "one-cycle",
            **values,
        }
        return Experiment.of(
            budget.stream,
            self.method,
            net=budget.net,
            recipe=COMPLETE,
            rank=self.rank,
            seeded=self.seeded,
            width=budget.width,
            tasks=budget.tasks,
            **settings,
            **fields,
        )


def contenders(budget: Budget) -> list[Contender]:
    """All rows of a budget's table."""
    rivals = [name for name in RIVALS if name in METHODS]
    return [
        *_ours(budget),
        *(_of_method(budget, name, name) for name in rivals),
        _of_method(budget, "parallel full", "parallel"),
        _of_method(budget, "multitask", "multitask"),
    ]


def _ours(budget: Budget) -> Iterator[Contender]:
    yield _of_method(budget, "rank", "rank")
    rates = _MNIST_RATES if "mnist" in budget.stream else _OTHER_RATES
    seeded = [{"store": "int8"} | rate | decay for rate, decay in product(rates, _DECAYS)]
    yield Contender(budget, SEEDED, "rank", seeded, "0,0", budget.seeded)
    if budget.net == "resnet18":  # with the MLP a learned factor beside them adds nothing
        yield Contender(budget, BOTH, "rank", seeded, "8,1", budget.seeded)


def _of_method(budget: Budget, name: str, method: str) -> Contender:
    """With the settings that were tried for today's tables, on whole streams with fewer epochs; if
    there were not as many as of other methods, with the method's own search."""
    before = tried_before(method, budget.stream, budget.net)
    if len(before) != TRIALS:
        return Contender(budget, name, method, trials(method))
    settings, scores = zip(*before, strict=True)
    return Contender(budget, name, method, settings, scores=scores)


def best_of(tried: Sequence[Experiment], results: Results) -> Experiment | None:
    """The trial that did best on held-out data; None until all were run, or if all failed."""
    if any(results.missing(trial) for trial in tried):
        return None
    scores = {trial: score for trial in tried if (score := _score(trial, results)) is not None}
    return max(scores, key=scores.__getitem__) if scores else None


def _score(trial: Experiment, results: Results) -> float | None:
    if trial.held_out is None:
        raise ValueError(f"{trial} is no trial: settings are never chosen on test data")
    measured = results.of(trial)
    return None if measured is None else statistics.mean(measured.accuracy)


def section(budget: Budget, results: Results | None = None) -> Section:
    rows = [contender.row(results) for contender in contenders(budget)]
    best = next(row.experiment for row in rows if row.name == budget.our_best)
    return Section(budget.title, MEASURES, rows, best)


@dataclass(frozen=True)
class BudgetTable(Table):
    budgets: Sequence[Budget] = BUDGETS

    def given(self, results: Results) -> BudgetTable:
        return replace(self, sections=[section(budget, results) for budget in self.budgets])


def equal_budgets(budgets: Sequence[Budget] = BUDGETS) -> BudgetTable:
    """Accuracy at the epochs, width, augmentation and schedule of our best, and what it costs."""
    sections = [section(budget) for budget in budgets]
    return BudgetTable("Equal budgets", sections, _NOTE, budgets)

"""Choosing the settings of methods by trials, the same number for every method, on seeds that no
other command uses, scored on held-out training data.

METHOD/trial-NN/seed-K   a run folder for each
METHOD.json              the chosen settings and all trials, sealed

In these names, the rank update without learned factors is rank-seeded, and independent networks of
rank 2 are parallel-rank-2.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rankup.errors import RankupError
from rankup.methods.info import Values
from rankup.methods.registry import method_info
from rankup.methods.search import Search
from rankup.methods.settings import apart, variant_of
from rankup.runs.comparison import is_comparison
from rankup.runs.folder import check_folder
from rankup.runs.halving import Halving, Learn, matrix_after, whole_cost
from rankup.runs.launch import Launch
from rankup.runs.many_seeds import run_seeds
from rankup.runs.process_pool import ProcessPool
from rankup.runs.ray_pool import RayPool
from rankup.runs.records import runs_in
from rankup.runs.seed_run import OnProgress, SeedRun
from rankup.storage.atomic import write_json
from rankup.storage.seal import sealed

FIRST_SEED = 1000  # of trials


@dataclass(frozen=True)
class Trial:
    """A trial: settings and their results on held-out data.

    Attributes:
        settings: what was tried.
        accuracy: the average accuracy of each seed.
        forgetting: the forgetting of each seed.
        failed: why a seed failed; None if none did.
        stopped: after how many tasks the trial was stopped; None if it learned all.
    """

    settings: Values
    accuracy: list[float]
    forgetting: list[float]
    failed: str | None = None
    stopped: int | None = None

    @property
    def score(self) -> tuple[float, float]:
        """Orders trials: failed ones come last, then those with fewer tasks, then those with lower
        mean accuracy."""
        if self.failed:
            return -1, -1
        return math.inf if self.stopped is None else self.stopped, statistics.mean(self.accuracy)


@dataclass(frozen=True)
class Outcome:
    """The content of `METHOD.json`."""

    method: str
    stream: str
    net: str
    width: int
    rank: str
    seeded: str | None
    tasks: int
    tasks_in_stream: int | None  # if these are only the first of them
    epochs: int
    batch: int
    given: Values  # of the recipe, the same for all trials
    seeds: list[int]
    held_out: float
    device: str
    versions: dict[str, str]
    search: Search
    budget: int  # of epochs, for all trials together
    chosen: Values
    trials: list[Trial]

    @property
    def shared(self) -> Values:
        """The settings that all trials had in common, which were not chosen."""
        best = max(self.trials, key=lambda trial: trial.score)
        return {name: v for name, v in best.settings.items() if name not in self.chosen}


class Tuning:
    """The trials of several methods in a folder. Raises an error if they cannot begin or continue
    there, before anything is run.

    Args:
        launch: makes the runs.
        trials: the settings to try, by method.
        root: the folder.
        search: whether all trials learn all tasks, or bad ones are stopped early.
        budget: the number of epochs for all trials of a method, if some are stopped early; by
            default half of what they would take to learn all tasks.
    """

    def __init__(
        self,
        launch: Launch,
        trials: Mapping[str, Sequence[Values]],
        root: Path,
        search: Search = Search.grid,
        budget: int | None = None,
    ) -> None:
        self.launch, self.trials, self.root, self.search = launch, trials, root, search
        if runs_in(root) or is_comparison(root):
            raise RankupError(f"{root} holds runs of another command: name a new folder with --out")
        self._refuse_given(launch.request.recipe_options)
        self.runs = {
            method: [self._seeds(method, number) for number in range(len(tried))]
            for method, tried in trials.items()
        }
        for run in (run for method in trials for run in self._all(method)):
            check_folder(run.config, run.folder, run.resume)
        for method in trials:
            self._refuse_fewer(method)
        self._costs = {method: whole_cost(runs) for method, runs in self.runs.items()}
        # The same for all methods, even if one of them has more trials.
        self.budget = budget or max(map(sum, self._costs.values())) // 2
        self._refuse_small()

    def learned(self, method: str) -> int:
        """How many tasks a method's trials have learned in total."""
        return sum(run.learned for run in self._all(method))

    def to_learn(self, method: str) -> int:
        """How many tasks a method's trials learn in total, at most."""
        tasks = len(self._all(method)) * self.launch.tasks
        if self.search is Search.grid:
            return tasks
        return min(tasks, tasks * self.budget // sum(self._costs[method]))

    def run(
        self,
        method: str,
        on_progress: OnProgress | None,
        note: Callable[[str], None],
        pool: RayPool | ProcessPool | None = None,
    ) -> Outcome:
        """Run a method's unfinished trials, choose the best and write the outcome.

        Args:
            on_progress: called with the progress of runs.
            note: called with messages for the user.
            pool: as for `run_seeds`.
        """
        learn = partial(run_seeds, on_progress=on_progress, note=note, pool=pool)
        tried = (
            self._halved(method, learn)
            if self.search is Search.asha
            else self._all_tasks(method, learn)
        )
        best = max(tried, key=lambda trial: trial.score)
        if best.failed or best.stopped is not None:
            failures = [trial.failed for trial in tried if trial.failed]
            many = "all" if len(failures) == len(tried) else f"{len(failures)} of"
            raise RankupError(
                f"{many} {len(tried)} trials of {method} failed, the first: {failures[0]}"
            )
        config = self.runs[method][self.trials[method].index(best.settings)][0].config
        outcome = Outcome(
            method=method,
            stream=config.stream,
            net=config.net,
            width=config.width,
            rank=config.rank,
            seeded=config.seeded,
            tasks=config.tasks,
            tasks_in_stream=config.tasks_in_stream,
            epochs=config.recipe["epochs"],
            batch=config.recipe["batch"],
            given=dict(self.launch.request.recipe_options),
            seeds=list(self.launch.seeds),
            held_out=config.held_out,
            device=config.device,
            versions=config.versions,
            search=self.search,
            budget=self.budget if self.search is Search.asha else sum(self._costs[method]),
            chosen=_choice(best, tried),
            trials=tried,
        )
        write_json(self.root / f"{self._name(method)}.json", sealed(asdict(outcome)))
        return outcome

    def _all_tasks(self, method: str, learn: Learn) -> list[Trial]:
        going = [run for run in self._all(method) if run.unfinished]
        failures = learn(going) if going else {}
        tried = zip(self.trials[method], self.runs[method], strict=True)
        return [_trial(settings, runs, failures, self.launch.tasks) for settings, runs in tried]

    def _halved(self, method: str, learn: Learn) -> list[Trial]:
        """The trials that were begun, with bad ones stopped early."""
        seed = self.launch.request.seed
        halving = Halving(self.runs[method], self.budget, seed, learn)
        halving.run()
        return [
            _trial(settings, self.runs[method][number], halving.failures, halving.learned[number])
            for number, settings in enumerate(self.trials[method])
            if halving.learned[number] or halving.has_failed(number)
        ]

    def _all(self, method: str) -> list[SeedRun]:
        return [run for runs in self.runs[method] for run in runs]

    def _seeds(self, method: str, number: int) -> list[SeedRun]:
        tried = apart({**method_info(method).recipe, **self.trials[method][number]})
        folder = self.root / self._name(method) / f"trial-{number + 1:02}"
        folders = {seed: folder / f"seed-{seed}" for seed in self.launch.seeds}
        return self.launch.of(method, {}, folders, settings=tried)

    def _name(self, method: str) -> str:
        """The method's name, with the variant if all trials are of the same one."""
        variants = {variant_of(method, self.launch.rank, tried) for tried in self.trials[method]}
        return method + (variants.pop() if len(variants) == 1 else "")

    def _refuse_fewer(self, method: str) -> None:
        """Raise an error if the folder has more trials than are to be run, so that a choice among
        more is not replaced by one among fewer."""
        folder, asked = self.root / self._name(method), len(self.trials[method])
        begun = sum(1 for trial in folder.glob("trial-*") if runs_in(trial))
        if begun > asked:
            raise RankupError(
                f"{folder} was started with {begun} trials, not {asked}: continue with the same "
                "options, or start new trials with --out"
            )

    def _refuse_small(self) -> None:
        if self.search is Search.grid:
            return
        for method, costs in self._costs.items():
            if self.budget < max(costs):
                raise RankupError(
                    f"a budget of {self.budget} epochs is too small: one trial of {method} takes "
                    f"{max(costs)} to learn all tasks"
                )

    def _refuse_given(self, recipe_options: Mapping[str, Any]) -> None:
        for method, tried in self.trials.items():
            for name in recipe_options:
                if name in tried[0]:
                    raise RankupError(
                        f"{name} was given, but it is what trials of {method} vary: leave it out"
                    )


def _choice(best: Trial, tried: Sequence[Trial]) -> Values:
    """Those of the best settings in which trials differ. Settings that all trials have in common
    were given by the user, and must be given again.

    >>> one, two = (Trial({"store": "int8", "lr": lr}, [lr], [0.0]) for lr in (0.1, 0.2))
    >>> _choice(two, [one, two])
    {'lr': 0.2}
    """
    if len(tried) == 1:
        return best.settings
    return {
        name: value
        for name, value in best.settings.items()
        if any(trial.settings.get(name) != value for trial in tried)
    }


def _trial(
    settings: Values, runs: Sequence[SeedRun], failures: Mapping[SeedRun, str], tasks: int
) -> Trial:
    for run in runs:
        if run in failures:
            return Trial(settings, [], [], failures[run])
    matrices = [matrix_after(run, tasks) for run in runs]
    return Trial(
        settings,
        [matrix.average_accuracy() for matrix in matrices],
        [matrix.forgetting() for matrix in matrices],
        stopped=tasks if tasks < runs[0].config.tasks else None,
    )

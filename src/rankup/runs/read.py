"""Reading runs from their folders: settings, results and selectors; and means over seeds."""

import json
import os
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from rankup.errors import RankupError
from rankup.metrics import AccuracyMatrix
from rankup.runs.records import (
    CONFIG,
    METRICS,
    NET,
    OF_A_SEED,
    read_config,
    read_metrics,
)

if TYPE_CHECKING:
    from rankup.layers.spec import FactoredSpec
    from rankup.rank import Place
    from rankup.storage.manifest import Manifest

# Settings in which runs of one setting may differ.
_OF_ONE_RUN = (*OF_A_SEED, "versions", "threads")

Array = npt.NDArray[np.float64]


@dataclass
class Run:
    """A run of a method on a stream, finished or not.

    Attributes:
        path: its folder.
        config: its settings.
        lines: the lines of its metrics, one per task learned.
        matrix: its accuracies.
        selectors: for each layer `[T, R]`, the selector of task t for factor i, NaN for factors
            that were added after the task. Empty for methods without factors.
        factors: for each layer the number of seeded factors, then those that each task added.
            Empty for methods without factors.
    """

    path: Path
    config: dict[str, Any]
    lines: list[dict[str, Any]]
    matrix: AccuracyMatrix
    selectors: dict[str, Array]
    factors: dict[str, list[int]]

    @property
    def method(self) -> str:
        return str(self.config["method"])

    @property
    def stream(self) -> str:
        return str(self.config["stream"])

    @property
    def tasks(self) -> list[str]:
        """The names of the tasks learned."""
        return [str(line["task"]) for line in self.lines]

    @property
    def asked(self) -> int:
        """How many tasks the run is to learn; how many it has learned if its settings lack that."""
        asked = self.config.get("tasks")
        return asked if isinstance(asked, int) else len(self.lines)

    @property
    def finished(self) -> bool:
        return len(self.lines) >= self.asked

    @property
    def unseeded(self) -> dict[str, Any]:
        """The settings that runs of several seeds have in common."""
        return {key: value for key, value in self.config.items() if key not in _OF_ONE_RUN}

    @property
    def untold(self) -> AccuracyMatrix | None:
        """Accuracy without being told the task; None if the run was not tested so."""
        return self._untold("accuracy")

    @property
    def guessed(self) -> AccuracyMatrix | None:
        """The share of samples whose task was guessed right; None if the run was not tested so."""
        return self._untold("tasks")

    def _untold(self, key: str) -> AccuracyMatrix | None:
        if any("untold" not in line for line in self.lines):
            return None
        return AccuracyMatrix([line["untold"][key] for line in self.lines])

    @property
    def parameters(self) -> float:
        return float(self.lines[-1]["parameters"])

    @property
    def buffer(self) -> float:
        return float(self.lines[-1]["buffer"])

    @property
    def seconds(self) -> float:
        return sum(float(line["seconds"]) for line in self.lines)


class OfASeed(Protocol):
    """The results of one seed."""

    @property
    def matrix(self) -> AccuracyMatrix: ...
    @property
    def parameters(self) -> float: ...
    @property
    def buffer(self) -> float: ...
    @property
    def untold(self) -> AccuracyMatrix | None: ...
    @property
    def guessed(self) -> AccuracyMatrix | None: ...
    @property
    def seconds(self) -> float: ...


class OverSeeds:
    """The results of several seeds, each by itself or averaged.

    Attributes:
        runs: the results of each seed.
    """

    runs: Sequence[OfASeed]

    @property
    def accuracy(self) -> list[float]:
        """Each seed's average accuracy over all tasks, after the last."""
        return [run.matrix.average_accuracy() for run in self.runs]

    @property
    def forgetting(self) -> list[float]:
        return [run.matrix.forgetting() for run in self.runs]

    @property
    def untold(self) -> list[float]:
        """Each seed's average accuracy without being told the task; empty unless all have it."""
        return _averages([run.untold for run in self.runs])

    @property
    def guessed(self) -> list[float]:
        """Each seed's average share of samples whose task was guessed right; empty unless all have
        it."""
        return _averages([run.guessed for run in self.runs])

    @property
    def averages(self) -> Array:
        """`[S, T]`: A_t of each seed after each task."""
        return np.array([run.matrix.average_accuracies() for run in self.runs])

    @property
    def matrix(self) -> Array:
        """`[T, T]`: the mean of the seeds' accuracy matrices."""
        mean: Array = np.mean([run.matrix.as_array() for run in self.runs], axis=0)
        return mean

    @property
    def parameters(self) -> float:
        return statistics.mean(run.parameters for run in self.runs)

    @property
    def buffer(self) -> float:
        return statistics.mean(run.buffer for run in self.runs)

    @property
    def seconds(self) -> float:
        """How long a seed took, on average."""
        return statistics.mean(run.seconds for run in self.runs)


def _averages(matrices: Sequence[AccuracyMatrix | None]) -> list[float]:
    """The average of each matrix after the last task; empty if any matrix is missing."""
    return [matrix.average_accuracy() for matrix in matrices if matrix] if all(matrices) else []


def percent(fraction: float) -> str:
    """A fraction in percent, with a minus sign in place of a hyphen.

    >>> percent(0.93414), percent(-0.25), percent(-0.00001)
    ('93.41', '−25.00', '0.00')
    """
    text = f"{100 * fraction:.2f}"
    return "0.00" if text == "-0.00" else text.replace("-", "−")


def spread(fractions: Sequence[float]) -> str:
    """The mean and standard deviation over seeds, in percent; for one seed the mean alone.

    >>> spread([0.9, 0.92, 0.94]), spread([0.9])
    ('92.00 ± 2.00', '90.00')
    """
    if len(fractions) == 1:
        return percent(fractions[0])
    return f"{percent(statistics.mean(fractions))} ± {percent(statistics.stdev(fractions))}"


def signed(fraction: float) -> str:
    """A difference in percentage points, with its sign.

    >>> signed(0.0125), signed(-0.25), signed(-0.00001)
    ('+1.25', '−25.00', '0.00')
    """
    text = percent(fraction)
    return text if text == "0.00" or fraction < 0 else f"+{text}"


def seed_groups(runs: Sequence[Run]) -> list[list[Run]]:
    """Groups of several runs that differ only in their seeds. The run that has learned most tasks
    is first, so that it can represent its group."""
    return [
        sorted(group, key=lambda run: -len(run.lines))
        for group in by_setting(runs).values()
        if len({run.config.get("seed") for run in group}) == len(group) > 1
    ]


def finished_groups(runs: Sequence[Run]) -> list[list[Run]]:
    """Groups of finished runs, whose results can be averaged. Those of an unfinished run, which
    has learned fewer tasks, are not comparable."""
    return seed_groups([run for run in runs if run.finished])


def by_setting(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each setting, of all seeds, by the setting as JSON."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(run.unseeded, sort_keys=True), []).append(run)
    return groups


def read_run(path: str | os.PathLike[str], selectors: bool = True) -> Run:
    """Read a run from its folder. If its network is damaged, warn and leave the selectors out.

    Args:
        selectors: whether to read the selectors, for which all files of the network are read.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise RankupError(f"there is no run folder {folder}")
    config = read_config(folder / CONFIG)
    lines, matrix = read_metrics(folder / METRICS)
    if not lines:
        raise RankupError(f"nothing has been learned yet in {folder}: {METRICS} has no whole line")
    run = Run(folder, config, lines, matrix, {}, {})
    if selectors:
        try:
            run.selectors, run.factors = _read_selectors(folder / NET, len(lines))
        except RankupError as error:
            warnings.warn(f"{error}; the run is shown without its selectors", stacklevel=2)
    return run


def _read_selectors(folder: Path, tasks: int) -> tuple[dict[str, Array], dict[str, list[int]]]:
    """The selectors of a network's first `tasks` tasks and the numbers of factors, as in `Run`,
    without loading the rest."""
    from rankup.layers.spec import FactoredSpec
    from rankup.storage.manifest import Manifest, is_of_network

    if not is_of_network(folder):  # a method without factors
        return {}, {}
    manifest = Manifest.read(folder)
    learned = min(tasks, len(manifest.tasks))
    layers = [spec for spec in manifest.specs if isinstance(spec, FactoredSpec)]
    if not learned or not layers:
        return {}, {}
    known = manifest.task_list()
    places = [known.place(task, index) for index, task in enumerate(known.tasks[:learned])]
    rows = [_read_task(folder, manifest, layers, i, p) for i, p in enumerate(places)]
    selectors = {spec.name: _padded([row[spec.name] for row in rows]) for spec in layers}
    factors = {
        spec.name: [spec.rank.seeded, *(spec.rank.added(place) for place in places)]
        for spec in layers
    }
    return selectors, factors


def _read_task(
    folder: Path,
    manifest: "Manifest",
    layers: "Sequence[FactoredSpec]",
    index: int,
    place: "Place",
) -> dict[str, Array]:
    """A task's selectors `[R]` by layer, in float64 however they are stored."""
    from rankup.storage.reading import part_of, read_checked

    task, file = manifest.tasks[index]
    path, selectors = folder / file.file, dict[str, Array]()
    tensors = read_checked(path, file)
    for spec in layers:
        shapes, dtype = spec.shapes(place, task.rows), manifest.learned_dtype(spec)
        kept, store = task.kept.get(spec.name), manifest.options.store
        wanted = {"selector": shapes["selector"]}
        part = part_of(path, tensors, spec, wanted, kept, store, {"selector": dtype})
        selectors[spec.name] = part["selector"].double().numpy()
    return selectors


def _padded(rows: list[Array]) -> Array:
    """`[T, R]`: rows of different lengths, padded with NaN."""
    table = np.full((len(rows), max(len(row) for row in rows)), np.nan)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return table

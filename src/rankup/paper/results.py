"""Results of experiments, each in a file named by what was run: folders from several machines are
merged by copying one into the other.

STREAM-NET/METHOD-DIGEST.json
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rankup.errors import RankupError
from rankup.metrics import AccuracyMatrix
from rankup.paper.experiment import Experiment
from rankup.runs.read import OverSeeds
from rankup.storage.atomic import write_file
from rankup.utils.files import read_regular


@dataclass(frozen=True)
class Result:
    """The result of a run of one seed."""

    seed: int
    config: dict[str, Any]
    accuracy: list[list[float]]  # after each task, on all tasks so far
    parameters: float
    buffer: float
    seconds: float
    date: str
    machine: str
    command: str
    failed: str = ""  # why, if it did not finish
    untold_rows: dict[str, list[list[float]]] | None = None  # the same without telling the task
    answer: float | None = None  # milliseconds for a batch, if that was measured

    @property
    def untold(self) -> AccuracyMatrix | None:
        return AccuracyMatrix(self.untold_rows["accuracy"]) if self.untold_rows else None

    @property
    def guessed(self) -> AccuracyMatrix | None:
        return AccuracyMatrix(self.untold_rows["tasks"]) if self.untold_rows else None

    @property
    def matrix(self) -> AccuracyMatrix:
        return AccuracyMatrix(self.accuracy)


@dataclass(frozen=True)
class Measured(OverSeeds):
    """An experiment's results, for the seeds that finished."""

    runs: list[Result]

    @property
    def answers(self) -> list[float]:
        """Milliseconds of an answer, where they were measured."""
        return [run.answer for run in self.runs if run.answer is not None]

    @property
    def bytes(self) -> float:
        """All that is stored, with what is kept of samples."""
        return 4 * (self.parameters + self.buffer)

    @property
    def by_seed(self) -> dict[int, float]:
        """Each seed's average accuracy."""
        return {run.seed: run.matrix.average_accuracy() for run in self.runs}


@dataclass(frozen=True)
class Results:
    root: Path

    def path(self, experiment: Experiment) -> Path:
        return self.root / f"{experiment.folder()}.json"

    def of(self, experiment: Experiment) -> Measured | None:
        """An experiment's results; None if no seed has any."""
        whole = [result for result in self._wanted(experiment) if not result.failed]
        return Measured(whole) if whole else None

    def failures(self, experiment: Experiment) -> list[str]:
        """Why any seeds failed."""
        return [result.failed for result in self._wanted(experiment) if result.failed]

    def missing(self, experiment: Experiment) -> list[int]:
        """Seeds that were not run."""
        runs = self._read(experiment)
        return [seed for seed in experiment.all_seeds if seed not in runs]

    def add(self, experiment: Experiment, results: Sequence[Result]) -> None:
        """Add results to those already there, a line for each, so that the file is readable."""
        runs = self._read(experiment) | {result.seed: result for result in results}
        lines = ",\n".join(
            json.dumps(_as_json(runs[seed]), ensure_ascii=False) for seed in sorted(runs)
        )
        known = json.dumps(experiment.known(), ensure_ascii=False)
        path = self.path(experiment)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, f'{{"known": {known},\n"runs": [\n{lines}\n]}}\n'.encode())

    def _wanted(self, experiment: Experiment) -> list[Result]:
        """The results of the seeds that the experiment asks for; there may be others."""
        runs = self._read(experiment)
        return [runs[seed] for seed in experiment.all_seeds if seed in runs]

    def _read(self, experiment: Experiment) -> dict[int, Result]:
        path = self.path(experiment)
        try:
            content = json.loads(read_regular(path))
            runs = [Result(**run) for run in content["runs"]]
            by_seed = {run.seed: run for run in map(_checked, runs)}
            lengths = {len(run.matrix) for run in runs if not run.failed}
            if len(by_seed) < len(runs) or len(lengths) > 1:
                raise ValueError("a seed appears twice, or has learned other tasks")
            if content["known"] != json.loads(json.dumps(experiment.known())):
                raise ValueError("it belongs to something else")
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise RankupError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError, RankupError):
            raise RankupError(
                f"{path} is not a results file: remove it, and its runs will be repeated"
            ) from None
        return by_seed


def _as_json(result: Result) -> dict[str, Any]:
    data = asdict(result)
    for name in ("untold_rows", "answer"):
        if data[name] is None:
            del data[name]
    return data


def _checked(run: Result) -> Result:
    """Refuse what no run could have written."""
    amounts = run.parameters, run.buffer, run.seconds, run.answer or 0.0
    if type(run.seed) is not int or not all(0 <= float(amount) < math.inf for amount in amounts):
        raise ValueError
    texts = run.date, run.machine, run.command, run.failed
    if not isinstance(run.config, dict) or not all(isinstance(text, str) for text in texts):
        raise TypeError
    if not isinstance(run.config.get("versions", {}), dict):
        raise TypeError
    return run

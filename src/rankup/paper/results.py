"""Results of runs, a file for each cell, named by what was run: folders from several machines are
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
from rankup.paper.experiment import Cell
from rankup.runs.seed_stats import OverSeeds
from rankup.storage.atomic import write_file


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

    @property
    def matrix(self) -> AccuracyMatrix:
        return AccuracyMatrix(self.accuracy)


@dataclass(frozen=True)
class Measured(OverSeeds):
    """A cell's results, for the seeds that finished."""

    runs: list[Result]


@dataclass(frozen=True)
class Results:
    root: Path

    def path(self, cell: Cell) -> Path:
        return self.root / f"{cell.folder()}.json"

    def of(self, cell: Cell) -> Measured | None:
        """A cell's results; None if no seed has any."""
        whole = [result for result in self._wanted(cell) if not result.failed]
        return Measured(whole) if whole else None

    def failures(self, cell: Cell) -> list[str]:
        """Why any seeds failed."""
        return [result.failed for result in self._wanted(cell) if result.failed]

    def missing(self, cell: Cell) -> list[int]:
        """Seeds that were not run."""
        found = self._found(cell)
        return [seed for seed in range(cell.seeds) if seed not in found]

    def add(self, cell: Cell, results: Sequence[Result]) -> None:
        """Add results to those already there. A line for each run, so that the file is readable."""
        runs = self._found(cell) | {result.seed: result for result in results}
        lines = ",\n".join(
            json.dumps(asdict(runs[seed]), ensure_ascii=False) for seed in sorted(runs)
        )
        known = json.dumps(cell.known(), ensure_ascii=False)
        path = self.path(cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, f'{{"known": {known},\n"runs": [\n{lines}\n]}}\n'.encode())

    def _wanted(self, cell: Cell) -> list[Result]:
        """The results of the seeds that the cell asks for; there may be others."""
        found = self._found(cell)
        return [found[seed] for seed in range(cell.seeds) if seed in found]

    def _found(self, cell: Cell) -> dict[int, Result]:
        path = self.path(cell)
        try:
            content = json.loads(path.read_bytes())
            runs = [Result(**run) for run in content["runs"]]
            found = {run.seed: run for run in map(_checked, runs)}
            lengths = {len(run.matrix) for run in runs if not run.failed}
            if len(found) < len(runs) or len(lengths) > 1:
                raise ValueError("a seed appears twice, or has learned other tasks")
            if content["known"] != json.loads(json.dumps(cell.known())):
                raise ValueError("it belongs to something else")
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise RankupError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError, RankupError):
            raise RankupError(
                f"{path} is not a results file: remove it, and its runs will be repeated"
            ) from None
        return found


def _checked(run: Result) -> Result:
    """Refuse what no run could have written."""
    amounts = run.parameters, run.buffer, run.seconds
    if type(run.seed) is not int or not all(0 <= float(amount) < math.inf for amount in amounts):
        raise ValueError
    texts = run.date, run.machine, run.command, run.failed
    if not isinstance(run.config, dict) or not all(isinstance(text, str) for text in texts):
        raise TypeError
    if not isinstance(run.config.get("versions", {}), dict):
        raise TypeError
    return run

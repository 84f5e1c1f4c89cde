"""Results of runs, each in a file of its own, named by what was run: folders from several machines
are merged by copying one into the other.

STREAM-NET/METHOD-DIGEST/seed-K.json
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rankup.errors import RankupError
from rankup.metrics import AccuracyMatrix
from rankup.paper.cells import Cell
from rankup.report.seeds import OverSeeds
from rankup.store import write_file


@dataclass(frozen=True)
class Result:
    """What a run of one seed came to."""

    known: dict[str, Any]  # of its cell
    seed: int
    config: dict[str, Any]
    accuracy: list[list[float]]  # after each task, on all tasks so far
    parameters: float
    buffer: float
    seconds: float
    date: str
    machine: str
    command: str
    failed: str = ""  # why, where it did not come to its end

    @property
    def matrix(self) -> AccuracyMatrix:
        return AccuracyMatrix(self.accuracy)


@dataclass(frozen=True)
class Measured(OverSeeds):
    """A cell's results, of those seeds that came to their end."""

    runs: list[Result]


@dataclass(frozen=True)
class Results:
    root: Path

    def path(self, cell: Cell, seed: int) -> Path:
        return self.root / cell.folder() / f"seed-{seed}.json"

    def of(self, cell: Cell) -> Measured | None:
        """A cell's results; None where no seed has any."""
        whole = [result for result in self._found(cell) if not result.failed]
        return Measured(whole) if whole else None

    def failure(self, cell: Cell) -> str:
        """Why a seed failed, if one did."""
        return next((result.failed for result in self._found(cell) if result.failed), "")

    def missing(self, cell: Cell) -> list[int]:
        """Seeds that were not run."""
        return [seed for seed in range(cell.seeds) if not self.path(cell, seed).exists()]

    def add(self, cell: Cell, results: Sequence[Result]) -> None:
        for result in results:
            path = self.path(cell, result.seed)
            path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(asdict(result), ensure_ascii=False)
            write_file(path, text.encode() + b"\n")

    def _found(self, cell: Cell) -> list[Result]:
        """Of all seeds that were run."""
        folder = self.root / cell.folder()
        paths = [folder / f"seed-{seed}.json" for seed in range(cell.seeds)]
        return [_read(path) for path in paths if path.exists()]


def _read(path: Path) -> Result:
    try:
        return Result(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        raise RankupError(
            f"{path} is no result of a run: remove it, and the run will be repeated"
        ) from None

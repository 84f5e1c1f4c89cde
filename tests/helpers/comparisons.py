"""Runs with known results, for comparisons."""

from pathlib import Path

from rankup.metrics import AccuracyMatrix
from rankup.runs.comparison import Entry
from rankup.runs.read import Run


def known_run(
    rows: list[list[float]], parameters: float = 7, buffer: float = 0, seconds: float = 0.5
) -> Run:
    line = {"task": "t", "parameters": parameters, "buffer": buffer, "seconds": seconds}
    return Run(Path("."), {}, [line] * len(rows), AccuracyMatrix(rows), {}, {})


def entry(name: str, number: int, runs: list[Run]) -> Entry:
    return Entry(name, number, True, len(runs), runs, [], "")

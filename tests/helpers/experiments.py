"""Cells of the paper's tables that run quickly, and fully known results."""

from collections.abc import Sequence

from rankup.paper.experiment import Experiment
from rankup.paper.results import Result

TINY = {"tasks": 2, "epochs": 2, "width": 16, "seeds": 2}


def tiny(method: str = "rank", **given: object) -> Experiment:
    return Experiment.of("p-digits", method, **{**TINY, **given})


def result(seed: int, accuracy: Sequence[Sequence[float]], **given: object) -> Result:
    rest = {"parameters": 1000.0, "buffer": 0.0, "seconds": 3.0, **given}
    about = {"config": {}, "date": "", "machine": "", "command": ""}
    return Result(seed=seed, accuracy=[list(row) for row in accuracy], **about, **rest)

"""Experiments that run quickly, and known results of others."""

from collections.abc import Sequence

from rankup.paper.experiment import Experiment
from rankup.paper.results import Result

TINY = {"tasks": 2, "epochs": 2, "width": 16, "seeds": 2}


def tiny(method: str = "rank", **settings: object) -> Experiment:
    return Experiment.of("p-digits", method, **{**TINY, **settings})


def result(seed: int, accuracy: Sequence[Sequence[float]], **numbers: object) -> Result:
    rest = {"parameters": 1000.0, "buffer": 0.0, "seconds": 3.0, **numbers}
    about = {"config": {}, "date": "", "machine": "", "command": ""}
    return Result(seed=seed, accuracy=[list(row) for row in accuracy], **about, **rest)

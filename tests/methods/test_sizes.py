"""What twenty tasks of MNIST's size store, with the paper's network, and options' bounds."""

from typing import Any

import pytest
import torch

import rankup
from rankup.data.streams import Stream
from rankup.data.tasks import Task
from rankup.methods import method_options
from rankup.rank import Rank
from rankup.testing import make_method

TASKS, HEAD = 20, 2570
X, Y = torch.randint(256, (10, 784), dtype=torch.uint8), torch.arange(10)
STREAM = Stream("digits", tuple(Task(f"{n}", 10, X, Y, X, Y) for n in range(TASKS)))
DENSE, MEMORY = 318_152, 5 * 39_200

STORED: list[tuple[str, dict[str, Any], float, float]] = [
    ("rank", {}, 109_020, 0),
    ("finetune", {}, DENSE, 0),
    ("ewc", {"samples": 5}, 584_904, 0),
    ("ewc", {"samples": 5, "anchors": "all"}, 851_656, 0),
    ("icarl", {"budget": 200}, DENSE, 200 * 196),
    ("agem", {}, DENSE, MEMORY),
    ("er-ring", {}, DENSE, MEMORY),
    ("der", {}, DENSE, MEMORY + 1000 * 11 + 2),
    ("hat", {}, 318_472, 0),
    ("packnet", {}, 369_480, 0),
    ("supsup", {}, 217_800, 0),
    ("wsn", {}, 494_280, 0),  # a bit per weight and task
    ("orthog", {}, DENSE, MEMORY),
    ("nscl", {}, 659_810, 0),
    ("gpm", {"threshold": 1.0}, DENSE + 10 * (785 + 257), 0),  # ten samples span ten directions
    ("ibpwf", {}, 85_272, 0),  # with what the prior expects: 14 factors per layer
    ("vera", {}, 112_840, 0),
    ("vera", {"directions": 896}, 107_720, 0),  # as 1536 and 768 seeded factors alone
    ("randlora", {}, 112_840, 0),
    ("randlora", {"block_rank": 127}, 107_600, 0),
    ("parallel", {"size": "2"}, 123_800, 0),
    ("parallel", {"size": "4"}, 185_960, 0),
    ("parallel", {}, 5_386_440, 0),
    ("multitask", {}, DENSE, 0),
]


@pytest.mark.parametrize(("name", "options", "parameters", "buffer"), STORED)
def test_twenty_tasks_store(
    name: str, options: dict[str, Any], parameters: float, buffer: float
) -> None:
    module = rankup.models.mlp(784)
    method = make_method(name, STREAM, module, rank=Rank(11, 1), options=options)
    # Where a later task takes long and adds only a head.
    tasks = 2 if name in ("nscl", "gpm") else TASKS
    while method.learned < tasks:
        method.begin(STREAM[method.learned])
        method.end()
    footprint = method.footprint()
    assert footprint.parameters + (TASKS - method.learned) * HEAD == parameters
    assert footprint.buffer == buffer


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("ewc", {"strength": -1.0}, "strength must be at least 0, got -1.0"),
        ("ewc", {"anchors": "both"}, "anchors must be one of latest, all, got 'both'"),
        ("hat", {"s_max": 0.5}, "s_max must be at least 1, got 0.5"),
        ("packnet", {"retrain": 1.5}, "retrain must be at most 1, got 1.5"),
        ("supsup", {"share": 0.0}, "share must be more than 0, got 0.0"),
        ("der", {"among": "none"}, "among must be one of own, all, got 'none'"),
        ("der", {"labels": -0.5}, "labels must be at least 0, got -0.5"),
        ("wsn", {"share": 1.5}, "share must be at most 1, got 1.5"),
        ("gpm", {"threshold": 1.01}, "threshold must be at most 1, got 1.01"),
        ("nscl", {"energy": 5.0}, "energy must be at most 1, got 5.0"),
        ("ibpwf", {"dictionary": 0}, "dictionary must be at least 1, got 0"),
        ("ibpwf", {"alpha": 0.0}, "alpha must be more than 0, got 0.0"),
        ("vera", {"directions": 0}, "directions must be at least 1, got 0"),
        ("randlora", {"block_rank": 0}, "block_rank must be at least 1, got 0"),
        ("parallel", {"size": "0"}, "size must be a rank of at least 1 or 'full'"),
        ("parallel", {"size": "2.5"}, "size must be a rank of at least 1 or 'full'"),
        ("parallel", {"size": "dense"}, "size must be a rank of at least 1 or 'full'"),
    ],
)
def test_options_out_of_bounds_are_refused(name: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(rankup.RankupError, match=reason):
        method_options(name, options)

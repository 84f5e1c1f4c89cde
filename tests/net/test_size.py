"""What is stored, what a task added and what is held in memory, counted exactly."""

import pytest
import torch

import rankup
from helpers.zoo import (
    inputs,
    module,
    taught,
    teach,
)
from rankup.rank import Rank

COUNTS = [
    (Rank(1, 1), 784, 10, 93_100),
    (Rank(6, 1), 784, 10, 101_060),
    (Rank(11, 1), 784, 10, 109_020),
    (Rank(11, 2), 784, 10, 138_888),
    (Rank(11, 4), 784, 10, 198_624),
    (Rank(11, 1), 3072, 5, 151_960),
    (Rank(11, 1), 84 * 84 * 3, 5, 694_840),
    (Rank(1, 1, seeded=256), 784, 10, 103_340),
    (Rank(0, 0, seeded=[1536, 768]), 784, 10, 107_720),
]


@pytest.mark.parametrize(("rank", "features", "classes", "expected"), COUNTS)
def test_parameter_counts_of_mlp(rank: Rank, features: int, classes: int, expected: int) -> None:
    net = rankup.grow(rankup.models.mlp(features, hidden=[256, 256]), rank)
    for task in range(20):
        net.begin_task(f"{task}", classes)
        net.commit_task()
    size = net.size()
    assert size.total == expected
    assert sum(net.size(task=task).total for task in net.tasks) == expected
    # The closed formula of the paper's notes, with everything learned counted.
    steps = [rank.first + rank.step * task for task in range(20)]
    assert size.factors == steps[-1] * (features + 256 + 256 + 256)
    assert size.heads == 20 * (256 * classes + classes)
    assert size.biases == 20 * 512
    seeded = sum(layer.spec.rank.seeded for layer in net.body.hidden)
    assert size.selectors == 2 * sum(steps) + 20 * seeded
    assert size.norms == size.dense == 0
    held = sum(layer.spec.rank.seeded * (layer.spec.inputs + 256) for layer in net.body.hidden)
    assert size.working >= size.total + held


def test_parameter_counts_of_resnet18() -> None:
    net = rankup.grow(rankup.models.resnet18(width=20), Rank.proportional(0.1, 0.02))
    x = torch.randn(2, 3, 32, 32)
    for task in range(20):
        net.begin_task(f"{task}", 5)
        net.commit_task([x])
    assert net.size().total == 765_897
    assert net.size().heads == 20 * (160 * 5 + 5)
    assert sum(net.size(task=task).total for task in net.tasks) == 765_897


def test_size_of_kept_network_counts_what_was_kept_once() -> None:
    given = module("resnet18")
    net = rankup.grow(given, Rank(1, 1), base="keep")
    kept = sum(p.numel() for n, p in given.named_parameters() if not n.startswith("head"))
    assert net.size().total == net.size().dense == kept
    teach(net, "a", inputs("resnet18"))
    assert net.size().dense == kept
    assert net.size().total == kept + net.size(task="a").total
    assert net.size(task="a").dense == 0


def test_working_counts_every_number_in_memory() -> None:
    net = taught("convolutions", rank=Rank(1, 1, seeded=5))
    assert net.size().working == sum(tensor.numel() for tensor in net.buffers())
    last = net.tasks[-1]
    # The last task uses every factor, so alone it holds all but the other tasks' rows.
    assert net.size(task=last).working < net.size().working
    assert net.size(task=net.tasks[0]).working < net.size(task=last).working

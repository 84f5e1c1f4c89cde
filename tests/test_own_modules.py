"""Modules that do more than run their layers: fitted as they are."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import rankup
from rankup import feed
from rankup.rank import Rank
from rankup.recipe import Recipe

RECIPE = Recipe(epochs=60, batch=32)


def halves(samples: int = 200) -> rankup.Task:
    """Whether the first half of a sample is larger than the second."""
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(samples, 12, generator=draw)
    y = (x[:, :6].sum(1) > x[:, 6:].sum(1)).long()
    return rankup.Task("halves", 2, x, y, x, y)


def right(net: rankup.IncrementalNet, task: rankup.Task, index: int = 0) -> float:
    return float((net.eval()(task.test_x, index).argmax(1) == task.test_y).float().mean())


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 2))


def turned(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0].flip(1),)


@pytest.mark.parametrize("given", [True, False])
def test_hooks_run_in_every_step(given: bool) -> None:
    """One on the module that is given, or on the network's own. What was learned without it would
    be wrong with it."""
    module = mlp()
    if given:
        module.register_forward_pre_hook(turned)
    net = rankup.grow(module, Rank(2, 1))
    if not given:
        net.body.register_forward_pre_hook(turned)
    for _ in range(2):  # the second has frozen factors, whose part can be computed once
        task = halves()
        rankup.fit(net, replace(task, name=f"{len(net.tasks)}"), RECIPE)
        assert right(net, task, len(net.tasks) - 1) > 0.9


class BlindWhileLearning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x * 0 if self.training else x)


@pytest.mark.parametrize("training", [True, False])
def test_what_happens_in_training_alone_happens(training: bool) -> None:
    net = rankup.grow(BlindWhileLearning().train(training), Rank(2, 1))
    with pytest.raises(rankup.TaskFailed, match="was not learned"):
        rankup.fit(net, halves(), RECIPE)


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("absent", None)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.mixing = nn.Linear(12, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 3, 4)
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.mixing(x.flatten(1)).relu())


def test_what_is_not_factored_starts_from_the_seed_alone() -> None:
    found = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        net = rankup.grow(Attentive(), Rank(2, 1), exclude=["attention"], seed=5)
        found.append(net.body.attention.in_proj_weight)
    assert torch.equal(*found)
    other = rankup.grow(Attentive(), Rank(2, 1), exclude=["attention"], seed=6)
    assert not torch.equal(found[0], other.body.attention.in_proj_weight)


def test_no_batch_that_norms_look_at_is_of_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "_CHUNK", 64)
    normed = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    task = halves(65)
    assert right(rankup.fit(rankup.grow(normed, Rank(2, 1)), task, RECIPE), task) > 0.9

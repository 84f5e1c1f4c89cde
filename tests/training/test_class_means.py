"""Heads that start from their classes' means answer with the nearest mean."""

import pytest
import torch
from torch import Tensor, nn

import rankup
from rankup.training.class_means import start_heads_from_means
from rankup.training.recipe import recipe_for


class Features(nn.Module):
    """Gives its inputs on as features."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        nn.init.eye_(self.inner.weight)
        nn.init.zeros_(self.inner.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


@pytest.fixture
def net() -> rankup.IncrementalNet:
    net = rankup.grow(Features(), rankup.Rank(1, 1), base="keep", head="head")
    net.begin_task("a", classes=3)
    return net


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 3
    middles = 3 + torch.randn(3, 4, generator=generator)
    return middles[y] + 0.1 * torch.randn(60, 4, generator=generator), y


def test_answers_with_the_nearest_mean(net, data):
    x, y = data
    start_heads_from_means(net, [(x[:30], y[:30]), (x[30:], y[30:])], 3)
    means = torch.stack([x[y == c].mean(0) for c in range(3)])
    points = 3 + 2 * torch.randn(500, 4, generator=torch.Generator().manual_seed(1))
    nearest = torch.cdist(points, means).argmin(1)
    assert torch.equal(net(points, task="a").argmax(1), nearest)


def test_leaves_a_head_without_differences_as_it_was(net, data):
    _, y = data
    before = net.get_submodule("body.head").new_weight.detach().clone()
    start_heads_from_means(net, [(torch.ones(60, 4), y)], 3)
    assert torch.equal(net.get_submodule("body.head").new_weight, before)


def test_a_class_without_samples_is_no_obstacle(net, data):
    x, y = data
    start_heads_from_means(net, [(x[y < 2], y[y < 2])], 3)
    assert net(x, task="a").isfinite().all()


def test_fit_starts_kept_networks_from_means():
    stream = rankup.data.make_stream("s-digits")
    torch.manual_seed(0)
    module = rankup.models.mlp(64, hidden=[64])
    net = rankup.grow(module, rankup.Rank(1, 1), base="keep")
    few = recipe_for("default", kept=True, samples=75)
    assert (few.head, few.selectors, few.epochs) == ("means", "0", 26)
    assert recipe_for("default", kept=True, samples=10_000).epochs == 8
    rankup.fit(net, stream[0], rankup.Recipe(epochs=1, lr=1e-6, head="means"))
    assert rankup.accuracy(net, stream[0]) > 0.95
    drawn = rankup.grow(module, rankup.Rank(1, 1), base="keep")
    with pytest.raises(rankup.TaskFailed):
        rankup.fit(drawn, stream[0], rankup.Recipe(epochs=1, lr=1e-6))

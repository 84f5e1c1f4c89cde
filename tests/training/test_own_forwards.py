"""Fitting networks whose layers run their own forward with a task's tensors."""

import pytest
import torch
from torch import Tensor, nn

import rankup
from rankup.training.recipe import Recipe


class Grouped(nn.Module):
    """A grouped convolution and an attention, which read their weights themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, groups=2, padding=1)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).flatten(2).transpose(1, 2)  # [B, positions, channels]
        y = y + self.attention(y, y, y, need_weights=False)[0]
        return self.head(y.relu().mean(1))


@pytest.mark.parametrize("base", ["new", "keep"])
def test_fit_learns_layers_that_read_their_own_weights(base: str) -> None:
    torch.manual_seed(0)
    net = rankup.grow(Grouped(), rankup.Rank(2, 1), base=base)  # type: ignore[arg-type]
    assert net.plan.substitutes
    y = torch.arange(64) % 2
    x = torch.rand(64, 8, 4, 4) + y.view(-1, 1, 1, 1) * torch.linspace(-1, 1, 8).view(-1, 1, 1)
    before: list[Tensor] = []
    for name in ("a", "b"):
        task = rankup.Task(name, 2, x, y, x, y)
        rankup.fit(net, task, Recipe(epochs=8, batch=16, lr=0.02))
        assert rankup.accuracy(net, task) > 0.9
        before.append(net.eval()(x, "a").detach())
    assert torch.equal(*before)

"""Modules of one's own, and a task to fit them with."""

import torch
from torch import Tensor, nn

import rankup
from rankup.training.recipe import Recipe

RECIPE = Recipe(epochs=15, batch=32, lr=0.05)


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


class Untracked(nn.Module):
    """With a norm that has no tensors but still looks at the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 8)
        self.norm = nn.BatchNorm1d(8, affine=False, track_running_stats=False)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layer(x)).relu())

"""A task of clusters, and a network that learns it quickly."""

import torch

import rankup
from rankup.rank import Rank
from rankup.training.recipe import Recipe

CPU = torch.device("cpu")


QUICK = Recipe(epochs=15, batch=32)


def clusters(name: str = "clusters", classes: int = 3, seed: int = 0) -> rankup.Task:
    """Samples around a centre for each class."""
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, 12, generator=draw)
    y = torch.arange(300) % classes
    x = centres[y] + 0.3 * torch.randn(300, 12, generator=draw)
    return rankup.Task(name, classes, x[:200], y[:200], x[200:], y[200:])


def net(**grow: object) -> rankup.IncrementalNet:
    rank = grow.pop("rank", Rank(2, 1))
    return rankup.grow(rankup.models.mlp(12, hidden=[16, 16]), rank, **grow)


def right(network: rankup.IncrementalNet, task: rankup.Task) -> float:
    return float((network(task.test_x, task.name).argmax(1) == task.test_y).float().mean())

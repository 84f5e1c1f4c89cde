"""Multilayer perceptron: hidden layers with ReLU and an output layer, in the paper three."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from rankup.errors import RankupError


class MLP(nn.Module):
    """Linear hidden layers with ReLU and a linear `head`, from `[B, …]`, flattened, to logits."""

    def __init__(self, inputs: int, hidden: Sequence[int], classes: int) -> None:
        super().__init__()
        self.options = {"inputs": inputs, "hidden": list(hidden)}
        sizes = [inputs, *hidden]
        self.hidden = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(sizes))
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.hidden:
            x = torch.relu(layer(x))
        logits: Tensor = self.head(x)
        return logits


def mlp(inputs: int, hidden: Sequence[int] = (256, 256), classes: int = 10) -> MLP:
    """Make a multilayer perceptron over flattened inputs. `classes` is the output layer's size,
    which a grown network replaces by one for each task.

    >>> mlp(784)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """
    sizes = [inputs, classes, *(hidden if isinstance(hidden, Sequence) else [0])]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise RankupError(
            f"mlp takes whole numbers of at least 1, got {inputs!r} inputs, hidden={hidden!r} and "
            f"{classes!r} classes"
        )
    return MLP(inputs, hidden, classes)

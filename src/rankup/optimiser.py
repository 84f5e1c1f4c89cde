"""Adam on one flat tensor: a step is a few operations however many parameters there are."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rankup.recipe import Recipe

_MEAN, _SQUARE, _EPS = 0.9, 0.999, 1e-8


def rate(recipe: Recipe, peak: float, step: int, steps: int) -> float:
    """The learning rate of a step, counted from 0.

    >>> recipe = Recipe(warmup=0.1)
    >>> [round(rate(recipe, 1.0, step, 101), 3) for step in (0, 5, 10, 55, 100)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if recipe.schedule == "constant":
        return peak
    warm = recipe.warmup * (steps - 1)
    if step < warm:
        return peak * 0.5 * (1 - math.cos(math.pi * step / warm))
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(steps - 1 - warm, 1)))


class FlatAdam:
    """Adam with decoupled weight decay. The parameters become views of one tensor, `flat`."""

    def __init__(self, parameters: Sequence[nn.Parameter], weight_decay: float) -> None:
        self.parameters = list(parameters)
        self.weight_decay = weight_decay
        self.flat = torch.cat([p.detach().flatten() for p in self.parameters])
        start = 0
        for p in self.parameters:
            p.data = self.flat[start : start + p.numel()].view_as(p)
            start += p.numel()
        self.mean = torch.zeros_like(self.flat)
        self.square = torch.zeros_like(self.flat)

    def step(self, loss: Tensor, number: int, lr: float) -> None:
        """Go down the gradient of the loss; `number` counts the steps from 0."""
        grads = torch.autograd.grad(loss, self.parameters)
        grad = torch.cat([g.flatten() for g in grads])
        self.mean.lerp_(grad, 1 - _MEAN)
        self.square.mul_(_SQUARE).addcmul_(grad, grad, value=1 - _SQUARE)
        # Both averages start at zero; these corrections take that out.
        mean_scale = 1 / (1 - _MEAN ** (number + 1))
        square_scale = 1 / (1 - _SQUARE ** (number + 1))
        size = (self.square * square_scale).sqrt_().add_(_EPS)
        if self.weight_decay:
            self.flat.mul_(1 - lr * self.weight_decay)
        self.flat.addcdiv_(self.mean, size, value=-lr * mean_scale)

    def state(self) -> dict[str, Tensor]:
        return {"flat": self.flat, "mean": self.mean, "square": self.square}

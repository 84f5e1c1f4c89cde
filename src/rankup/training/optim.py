"""Optimisers that update all parameters as views of one flat tensor, so that a step is a few
operations, however many parameters there are."""

import math
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import Protocol

import torch
from torch import Tensor

from rankup.layers import Tensors
from rankup.training.recipe import Recipe

# A GPU uses one block of threads per 65,536 numbers of a tensor, so small tensors are split to
# occupy more of it; one launch takes at most 36 tensors.
_SMALLEST_SPLIT, _MOST_SPLITS = 4096, 36
_ALIGNED = 32  # numbers; a GPU wants each parameter aligned
_FEW_STEPS = 10  # with fewer, a one-cycle schedule does not spend steps at a rate of zero


def rate(recipe: Recipe, peak: float, step: int, steps: int) -> float:
    """The learning rate of a step, counted from 0.

    >>> recipe = Recipe(warmup=0.1)
    >>> [round(rate(recipe, 1.0, step, 101), 3) for step in (0, 5, 10, 55, 100)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    >>> [round(rate(recipe, 1.0, step, 3), 3) for step in range(3)]  # too few to waste one
    [1.0, 0.75, 0.25]
    """
    if recipe.schedule == "constant":
        return peak
    if steps < _FEW_STEPS:
        return peak * 0.5 * (1 + math.cos(math.pi * step / steps))
    warm = recipe.warmup * (steps - 1)
    if step < warm:
        return peak * 0.5 * (1 - math.cos(math.pi * step / warm))
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(steps - 1 - warm, 1)))


@lru_cache(maxsize=64)  # seeds and tasks share them
def rates(recipe: Recipe, peak: float, steps: int) -> tuple[float, ...]:
    """The learning rates of all steps."""
    return tuple(rate(recipe, peak, step, steps) for step in range(steps))


class Optimiser(Protocol):
    """Updates the tensor `flat` at every step."""

    flat: Tensor

    def step(self, grad: Tensor, lr: float | Tensor) -> None:
        """Update `flat` by its gradient. With a row per replica, `lr` may have a rate for each."""

    def state(self, number: int | None = None) -> dict[str, Tensor]:
        """The tensors from which to resume; with `number`, those of that replica."""

    def restart(self) -> None:
        """Reset all state but `flat` to that before the first step."""


def make_optimiser(recipe: Recipe, flat: Tensor) -> Optimiser:
    if recipe.optimiser == "sgd":
        return FlatSGD(flat, recipe.weight_decay)
    return FlatAdam(flat, recipe.weight_decay)


class FlatAdam:
    """Adam with decoupled weight decay on `flat`, in torch's own fused kernel."""

    def __init__(self, flat: Tensor, weight_decay: float) -> None:
        self.flat = flat
        self.weight_decay = weight_decay
        self.mean = torch.zeros_like(flat)
        self.square = torch.zeros_like(flat)
        self.count = torch.zeros((), device=flat.device, dtype=torch.float32)  # steps taken
        self._splits = [self._split(t) for t in (self.flat, self.mean, self.square)]
        self._counts = [self.count] * len(self._splits[0])

    @torch.no_grad()
    def step(self, grad: Tensor, lr: float | Tensor) -> None:
        self.count += 1
        lr = lr[0] if isinstance(lr, Tensor) and lr.dim() else lr  # the same for all
        flat, mean, square = self._splits
        torch._fused_adamw_(
            flat,
            self._split(grad),
            mean,
            square,
            [],
            self._counts,
            lr=lr,
            beta1=0.9,
            beta2=0.999,
            weight_decay=self.weight_decay,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    def state(self, number: int | None = None) -> dict[str, Tensor]:
        state = {"flat": self.flat, "mean": self.mean, "square": self.square}
        if number is not None:
            state = {name: tensor[number] for name, tensor in state.items()}
        return state | {"count": self.count}

    def restart(self) -> None:
        for tensor in (self.mean, self.square, self.count):
            tensor.zero_()

    def _split(self, tensor: Tensor) -> list[Tensor]:
        if tensor.device.type != "cuda":
            return [tensor]
        return list(torch.split(tensor.view(-1), split_size(tensor.numel())))


def split_size(numbers: int) -> int:
    """How many of these numbers a GPU updates together; a multiple of 32, for alignment.

    >>> split_size(100), split_size(150_000), split_size(5_400_000)
    (4096, 4192, 150016)
    """
    return max(_SMALLEST_SPLIT, 32 * math.ceil(numbers / (32 * _MOST_SPLITS)))


class FlatSGD:
    """Gradient descent with decoupled weight decay on `flat`, without momentum."""

    def __init__(self, flat: Tensor, weight_decay: float) -> None:
        self.flat = flat
        self.weight_decay = weight_decay

    @torch.no_grad()
    def step(self, grad: Tensor, lr: float | Tensor) -> None:
        lr = lr[0] if isinstance(lr, Tensor) and lr.dim() else lr  # the same for all
        if self.weight_decay:
            self.flat.mul_(1 - lr * self.weight_decay)
        self.flat.sub_(grad * lr)

    def state(self, number: int | None = None) -> dict[str, Tensor]:
        return {"flat": self.flat if number is None else self.flat[number]}

    def restart(self) -> None:
        pass


class PerReplica:
    """An optimiser for each replica, for replicas with different recipes."""

    def __init__(self, recipes: Sequence[Recipe], flat: Tensor) -> None:
        self.flat = flat
        self.optimisers = [make_optimiser(*pair) for pair in zip(recipes, flat, strict=True)]

    def step(self, grad: Tensor, lr: float | Tensor) -> None:
        for number, optimiser in enumerate(self.optimisers):
            optimiser.step(grad[number], lr[number] if isinstance(lr, Tensor) else lr)

    def state(self, number: int | None = None) -> dict[str, Tensor]:
        assert number is not None
        return self.optimisers[number].state()

    def restart(self) -> None:
        for optimiser in self.optimisers:
            optimiser.restart()


def views(flat: Tensor, like: Tensors) -> Tensors:
    """Views of `flat [P]` or `[replicas, P]` in the shapes of `like`, by name."""
    rows = torch.split(flat, [aligned_size(tensor) for tensor in like.values()], -1)
    return {
        name: row[..., : tensor.numel()].view((*flat.shape[:-1], *tensor.shape))
        for (name, tensor), row in zip(like.items(), rows, strict=True)
    }


def flattened(tensors: Iterable[Tensor], leading: int, out: Tensor | None = None) -> Tensor:
    """The inverse of `views`: all dimensions after the first `leading` ones become one."""
    rows: list[Tensor] = []
    for tensor in tensors:
        dense = tensor.to_dense() if tensor.is_sparse else tensor
        if leading == 0 and not dense.is_cuda:  # faster, as nothing is aligned
            rows.append(dense.reshape(-1))
            continue
        row = dense.reshape(*dense.shape[:leading], -1)
        rows.append(row)
        single = dense if leading == 0 else dense[0]
        if gap := aligned_size(single) - single.numel():
            rows.append(_zeros((*row.shape[:-1], gap), row.dtype, row.device))
    return torch.cat(rows, -1, out=out)


def aligned_size(tensor: Tensor) -> int:
    """The numbers that a tensor takes up in a flat one; on a GPU with padding for alignment."""
    unit = _ALIGNED if tensor.device.type == "cuda" else 1
    return math.ceil(tensor.numel() / unit) * unit


@cache  # so that a captured step does not compute them every time
def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)

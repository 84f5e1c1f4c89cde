"""An optimiser for several tasks at once. Rates, decay, clipping, loss scales and all state are
each task's own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rankup.training.recipe import Recipe

_BETAS, _EPS = (0.9, 0.999), 1e-8  # as in torch
_SCALE, _DOUBLED_AFTER = 2.0**16, 2000  # as in torch.amp.GradScaler


class PerTaskOptimiser:
    """Adam with decoupled weight decay, or plain gradient descent, on the rows of `flat [A, P]`.

    A task whose gradient is not finite skips the step. Nothing here waits for the device.

    Args:
        clip: the largest norm of a task's gradient; None for any.
        scales: whether losses are scaled for gradients in float16. Each task has a scale, which is
            halved if its gradient overflows and doubled after many steps in which none did.
    """

    def __init__(
        self, recipes: Sequence[Recipe], flat: Tensor, clip: float | None, scales: bool
    ) -> None:
        self.adapts = recipes[0].optimiser == "adam"
        self.clip, self.scales = clip, scales

        def row(values: Sequence[float]) -> Tensor:  # [A, 1]
            return torch.tensor(values, dtype=torch.float64, device=flat.device)[:, None]

        zeros = [0.0] * len(flat)
        self.state = {
            "flat": flat,
            "decay": row([recipe.weight_decay for recipe in recipes]),
            "count": row(zeros),  # steps taken
            "scale": row([_SCALE if scales else 1.0] * len(flat)),
            "unbroken": row(zeros),  # steps since a scale changed
        }
        if self.adapts:
            self.state |= {"mean": torch.zeros_like(flat), "square": torch.zeros_like(flat)}

    def keep(self, tasks: Sequence[int]) -> None:
        """Keep only the rows of these tasks."""
        index = torch.tensor(tasks, device=self.state["flat"].device)
        self.state = {name: tensor.index_select(0, index) for name, tensor in self.state.items()}

    @torch.no_grad()
    def step(self, grad: Tensor, lr: Tensor, learns: Tensor) -> None:
        """Take a step.

        Args:
            grad: `[A, P]`, the gradients of scaled losses.
            lr: `[A, 1]`, the learning rates.
            learns: `[A, 1]`, which tasks take the step.
        """
        state = self.state
        if self.scales:
            grad = grad / state["scale"].to(grad.dtype)
        norm = torch.linalg.vector_norm(grad, dim=1, keepdim=True)
        finite = norm.isfinite()
        if self.scales:
            self._rescale(finite, learns)
        if self.clip is not None:
            grad = grad * (self.clip / (norm + 1e-6)).clamp(max=1)
        taken = finite & learns
        grad = torch.where(taken, grad, 0)
        state["count"] += taken
        lr = torch.where(taken, lr, 0)
        state["flat"].mul_((1 - lr * state["decay"]).to(grad.dtype))
        if self.adapts:
            self._adapt(grad, lr, taken)
        else:
            state["flat"].sub_(grad * lr.to(grad.dtype))

    def _adapt(self, grad: Tensor, lr: Tensor, taken: Tensor) -> None:
        mean, square = self.state["mean"], self.state["square"]
        first, second = ((1 - beta) * taken.to(grad.dtype) for beta in _BETAS)
        mean.lerp_(grad, first)  # by nothing where a step is skipped
        square.mul_(1 - second).addcmul_(grad, grad * second)
        count = self.state["count"].clamp(min=1)
        unbiased = [1 - beta**count for beta in _BETAS]
        size = (lr / unbiased[0]).to(grad.dtype)
        below = square.sqrt().div_(unbiased[1].sqrt().to(grad.dtype)).add_(_EPS)
        self.state["flat"].addcdiv_(mean * -size, below)

    def _rescale(self, finite: Tensor, learns: Tensor) -> None:
        scale, unbroken = self.state["scale"], self.state["unbroken"]
        unbroken.copy_(torch.where(finite, unbroken + learns, 0))
        double = unbroken >= _DOUBLED_AFTER
        factor = torch.where(finite, torch.where(double, 2.0, 1.0), 0.5)
        scale.mul_(torch.where(learns, factor, 1.0).to(scale.dtype))
        unbroken.masked_fill_(double, 0)

"""The autograd function of linear layers that run for several tasks at once. It adds products to a
tensor in place, where torch's own operations would compute two tensors and their sum."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class StackedMap(torch.autograd.Function):
    """`x W₀ᵀ + [x Vᵀ, 1] U` for A tasks, with `x [A, n, in]`, `V [A, r, in]` and `U [A, r, out]`,
    or `[A, r + 1, out]` with a bias as its last row. V or W₀ may be missing.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, U: Tensor, V: Tensor | None, base: Tensor | None) -> Tensor:
        hidden = _hidden(x, V, U.shape[1])
        ctx.save_for_backward(x, U, V, base, hidden)
        if base is None:
            return torch.bmm(hidden, U)
        return F.linear(x, base).baddbmm_(hidden, U)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, U, V, base, hidden = ctx.saved_tensors
        wants_x, wants_U, wants_V, _ = ctx.needs_input_grad
        to_x = to_V = None
        if wants_x:
            to_x = torch.zeros_like(x) if base is None else grad @ base
        if V is not None:
            to_hidden = torch.bmm(grad, U[:, : V.shape[1]].mT)  # [A, n, r]
            to_V = torch.bmm(to_hidden.mT, x) if wants_V else None
            to_x = None if to_x is None else to_x.baddbmm_(to_hidden, V)
        return to_x, torch.bmm(hidden.mT, grad) if wants_U else None, to_V, None


def _hidden(x: Tensor, V: Tensor | None, rows: int) -> Tensor:
    """`[A, n, rows]`: each factor's hidden channel and, if there is a bias, one that is 1."""
    if V is None:
        return x.new_ones(*x.shape[:2], rows)
    hidden = torch.bmm(x, V.mT)
    if rows == hidden.shape[2]:
        return hidden
    return torch.cat([hidden, hidden.new_ones(*x.shape[:2], 1)], 2)

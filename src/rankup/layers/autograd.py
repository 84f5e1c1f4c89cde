"""The factored map of a task being learned as one node of autograd's graph.

Most of a small network's step is the cost of launching operations, not arithmetic. Written out, the
node launches half as many as autograd would, and none for what is frozen.
"""

from typing import Any

import torch
from torch import Tensor


class FactoredMap(torch.autograd.Function):
    """`((x Vᵀ) · selector) U + bias` over old factors, which are frozen, and new ones.

    `projected` is `x V_oldᵀ` if that was computed before. New factors, the bias or the old
    factors may be missing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [N, in]
        selector: Tensor,  # [R]
        new_U: Tensor | None,
        new_V: Tensor | None,
        bias: Tensor | None,
        old_U: Tensor,
        old_V: Tensor,
        projected: Tensor | None,
    ) -> Tensor:
        parts = _parts(x, selector, new_U, new_V, old_U, old_V, projected)
        _, scaled, U, _ = parts
        ctx.new = 0 if new_U is None else len(new_U)
        ctx.is_projected = projected is not None
        # All of it is held by others or needed anyway: second derivatives take no memory.
        ctx.save_for_backward(x, selector, new_U, new_V, old_U, old_V, *parts)
        return scaled @ U if bias is None else torch.addmm(bias, scaled, U)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, selector, new_U, new_V, old_U, old_V, hidden, scaled, U, V = ctx.saved_tensors
        if torch.is_grad_enabled():
            # The gradient is to be differentiated as well, and what was computed without recording
            # would be taken for constant.
            projected = hidden[:, : len(old_U)] if ctx.is_projected else None
            hidden, scaled, U, V = _parts(x, selector, new_U, new_V, old_U, old_V, projected)
        wants_x, _, wants_U, wants_V, wants_bias, *_ = ctx.needs_input_grad
        to_scaled = grad @ U.t()  # [N, R]
        to_hidden = to_scaled * selector
        return (
            to_hidden @ V if wants_x else None,
            (to_scaled * hidden).sum(0),
            scaled[:, -ctx.new :].t() @ grad if wants_U else None,
            to_hidden[:, -ctx.new :].t() @ x if wants_V else None,
            grad.sum(0) if wants_bias else None,
            None,
            None,
            None,
        )


def _parts(
    x: Tensor,
    selector: Tensor,
    new_U: Tensor | None,
    new_V: Tensor | None,
    old_U: Tensor,
    old_V: Tensor,
    projected: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each factor's projection of x, before and after the selector, and the factors U and V."""
    U = old_U if new_U is None else torch.cat([old_U, new_U])
    # Only a network's inputs are projected before, so no gradient goes on through V to x.
    V = old_V if new_V is None or projected is not None else torch.cat([old_V, new_V])
    if projected is None:
        hidden = x @ V.t()  # [N, R]
    elif new_V is None:
        hidden = projected
    else:
        hidden = torch.cat([projected, x @ new_V.t()], 1)
    return hidden, hidden * selector, U, V

"""Autograd functions of the factored layers of the open task.

A small network's step mostly takes the time of starting operations, not of computing. Written by
hand, a backward pass has half as many operations, and none for frozen factors.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class FactoredMap(torch.autograd.Function):
    """`((x Vᵀ) · selector) U + bias`, where `U [R, out]` and `V [R, in]` are the frozen factors
    followed by the new ones.

    New factors and the bias may be None, and there may be no old factors. `projected [N, R_old]` is
    `x V_oldᵀ`, if that was computed before.
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
        # Others hold these tensors or backward needs them: second derivatives take no more memory.
        ctx.save_for_backward(x, selector, new_U, new_V, old_U, old_V, *parts)
        return scaled @ U if bias is None else torch.addmm(bias, scaled, U)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, selector, new_U, new_V, old_U, old_V, hidden, scaled, U, V = ctx.saved_tensors
        if torch.is_grad_enabled():
            # For second derivatives, compute again with autograd on what forward computed without.
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
    """Hidden channels `[N, R]` before and after the selector, and all factors' U and V."""
    U = old_U if new_U is None else torch.cat([old_U, new_U])
    # Only the network's inputs are projected beforehand, and they need no gradient through V_old.
    V = old_V if new_V is None or projected is not None else torch.cat([old_V, new_V])
    if projected is None:
        hidden = x @ V.t()  # [N, R]
    elif new_V is None:
        hidden = projected
    else:
        hidden = torch.cat([projected, x @ new_V.t()], 1)
    return hidden, hidden * selector, U, V


class KeptMap(torch.autograd.Function):
    """`x W₀ᵀ + ((x Vᵀ) · selector) U + bias`, the same with a kept weight, which is frozen.

    With `merges`, W₀ and the factors are merged into one weight, in forward and again in backward:
    one product in place of three. No gradient of that weight is computed, only those of the new
    factors.

    All is computed in the dtype of `x`; other tensors are cast here, which saves autograd's nodes
    for casts. New factors and the bias may be None, and there may be no old factors.
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
        base: Tensor,
        merges: bool,
    ) -> Tensor:
        U, V = _joined(old_U, new_U, x.dtype), _joined(old_V, new_V, x.dtype)
        scale = selector.to(x.dtype)
        hidden = None if merges else x @ V.t()  # [N, R]
        weight = base.to(x.dtype) if hidden is not None else _merged(base, scale, U, V)
        y = F.linear(x, weight, None if bias is None else bias.to(x.dtype))
        if hidden is not None:
            y.addmm_(hidden * scale, U)
        ctx.new = 0 if new_U is None else len(new_U)
        ctx.dtypes = [None if t is None else t.dtype for t in (new_U, new_V, bias)]
        # Cast or merged weights and scaled hidden channels are quick to compute again.
        ctx.save_for_backward(x, selector, base, hidden, U, V, new_U, new_V, old_U, old_V)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, selector, base, hidden, U, V, *factors = ctx.saved_tensors
        merges = hidden is None
        if is_recorded := torch.is_grad_enabled():
            # For second derivatives, as in `FactoredMap`.
            new_U, new_V, old_U, old_V = factors
            U, V = _joined(old_U, new_U, x.dtype), _joined(old_V, new_V, x.dtype)
        if merges or is_recorded:
            hidden = x @ V.t()
        new, grad, scale = ctx.new, grad.to(x.dtype), selector.to(x.dtype)
        to_U, to_V, to_bias = ctx.dtypes
        wants_x, _, wants_U, wants_V, wants_bias, *_ = ctx.needs_input_grad
        to_scaled = grad @ U.t()  # [N, R]
        to_x = None
        if wants_x and merges:
            to_x = grad @ _merged(base, scale, U, V)
        elif wants_x:
            to_x, to_hidden = grad @ base.to(x.dtype), to_scaled * scale
            to_x = torch.addmm(to_x, to_hidden, V) if is_recorded else to_x.addmm_(to_hidden, V)
        scaled = hidden[:, -new:] * scale[-new:] if wants_U else None
        to_new = to_scaled[:, -new:] * scale[-new:] if wants_V else None
        return (
            to_x,
            (to_scaled * hidden).sum(0, dtype=selector.dtype),
            None if scaled is None else (scaled.t() @ grad).to(to_U),
            None if to_new is None else (to_new.t() @ x).to(to_V),
            grad.sum(0, dtype=to_bias) if wants_bias else None,
            *[None] * 4,
        )


def _merged(base: Tensor, scale: Tensor, U: Tensor, V: Tensor) -> Tensor:
    """`W₀ + Uᵀ diag(scale) V`, `[out, in]`."""
    return torch.addmm(base.to(V.dtype), (U * scale[:, None]).t(), V)


def kept_map(
    x: Tensor,  # [N, in]
    selector: Tensor,
    new_U: Tensor | None,
    new_V: Tensor | None,
    bias: Tensor | None,
    old_U: Tensor,
    old_V: Tensor,
    base: Tensor,
) -> Tensor:
    """What `KeptMap` computes, in torch's own operations, for transforms that do not support it."""
    U, V = _joined(old_U, new_U, x.dtype), _joined(old_V, new_V, x.dtype)
    y = F.linear(x, base.to(x.dtype), None if bias is None else bias.to(x.dtype))
    return torch.addmm(y, (x @ V.t()) * selector.to(x.dtype), U)


def _joined(old: Tensor, new: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Frozen and new factors in one tensor, for one product in place of two."""
    if new is None:
        return old.to(dtype)
    return torch.cat([old.to(dtype), new.to(dtype)]) if len(old) else new.to(dtype)

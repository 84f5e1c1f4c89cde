"""A convolution's kernel from its factors, and their gradients from its gradient, in four launches
where torch's own operations take seventeen."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_RANK = 16  # factors that are looked at together; fewer do not fill a tensor core
_OUT = 32
_IN = 64


def build_kernel(
    U: Tensor,
    V: Tensor,
    new_U: Tensor,
    new_V: Tensor,
    selector: Tensor,
    shape: tuple[int, int, int],
) -> Tensor:
    """`[out, channels, height, width]` in bfloat16 and channels-last order: the sum over all
    factors, old and new, of `U[r]` times the selector's entry times `V[r]`, multiplied in tf32.

    Args:
        U, V: frozen factors, `[R, out]` and `[R, in]`.
        new_U, new_V: factors that are being learned, likewise.
        selector: a number for each factor, the frozen ones first.
        shape: channels, height and width.
    """
    kernel: Tensor = _Build.apply(U, V, new_U, new_V, selector, shape)
    return kernel


class _Build(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        U: Tensor,
        V: Tensor,
        new_U: Tensor,
        new_V: Tensor,
        selector: Tensor,
        shape: tuple[int, int, int],
    ) -> Tensor:
        outputs, inputs = new_U.shape[1], new_V.shape[1]
        kernel = torch.empty(
            outputs,
            *shape,
            dtype=torch.bfloat16,
            device=U.device,
            memory_format=torch.channels_last,
        )
        _forward[(triton.cdiv(outputs, _OUT), triton.cdiv(inputs, _IN))](
            U, V, new_U, new_V, selector, kernel,
            outputs, inputs, len(U), len(new_U), shape[0],
            POSITIONS=shape[1] * shape[2], OUT=_OUT, IN=_IN, RANK=_RANK,
        )  # fmt: skip
        ctx.save_for_backward(U, V, new_U, new_V, selector)
        ctx.shape = shape
        return kernel

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        U, V, new_U, new_V, selector = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        outputs, inputs, old, new = new_U.shape[1], new_V.shape[1], len(U), len(new_U)
        # New factors are looked at after the old ones, from a tile of their own on.
        tiles = triton.cdiv(old, _RANK) + triton.cdiv(new, _RANK)
        parts = triton.cdiv(outputs, _OUT)
        by_selector = torch.empty(parts, old + new, device=U.device)
        by_U, by_V = torch.empty_like(new_U), torch.empty_like(new_V)
        sizes = outputs, inputs, old, new, ctx.shape[0]
        tiling = {"POSITIONS": ctx.shape[1] * ctx.shape[2], "OUT": _OUT, "IN": _IN, "RANK": _RANK}
        _to_selector[(tiles, parts)](
            U, V, new_U, new_V, selector, grad, by_selector, by_U, *sizes, **tiling
        )  # fmt: skip
        _to_V[(triton.cdiv(new, _RANK), triton.cdiv(inputs, _IN))](
            new_U, selector, grad, by_V, *sizes, **tiling
        )
        return None, None, by_U, by_V, by_selector.sum(0), None


# One compiled kernel for all layers with as many positions: what one made for its sizes would save
# is worth less than its compilation.
_jit = triton.jit(do_not_specialize=("outputs", "inputs", "old", "new", "channels"))


@triton.jit
def _place(o, i, inputs, channels, POSITIONS: tl.constexpr):
    """Where an entry of the matrix `[out, in]` is in a kernel that is stored channels last."""
    return o * inputs + (i % POSITIONS) * channels + i // POSITIONS


@_jit
def _forward(
    U, V, new_U, new_V, selector, kernel, outputs, inputs, old, new, channels,
    POSITIONS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0) * OUT + tl.arange(0, OUT)
    i = tl.program_id(1) * IN + tl.arange(0, IN)
    r = tl.arange(0, RANK)
    is_out, is_in = o < outputs, i < inputs
    weight = tl.zeros((OUT, IN), tl.float32)
    for start in range(0, old, RANK):
        own = start + r
        has = own < old
        u = tl.load(
            U + own[None, :] * outputs + o[:, None], mask=has[None, :] & is_out[:, None], other=0
        )
        s = tl.load(selector + own, mask=has, other=0)
        v = tl.load(
            V + own[:, None] * inputs + i[None, :], mask=has[:, None] & is_in[None, :], other=0
        )
        weight += tl.dot(u * s[None, :], v, input_precision="tf32")
    for start in range(0, new, RANK):
        own = start + r
        has = own < new
        u = tl.load(
            new_U + own[None, :] * outputs + o[:, None],
            mask=has[None, :] & is_out[:, None],
            other=0,
        )
        s = tl.load(selector + old + own, mask=has, other=0)
        v = tl.load(
            new_V + own[:, None] * inputs + i[None, :],
            mask=has[:, None] & is_in[None, :],
            other=0,
        )
        weight += tl.dot(u * s[None, :], v, input_precision="tf32")
    tl.store(
        kernel + _place(o[:, None], i[None, :], inputs, channels, POSITIONS),
        weight.to(kernel.dtype.element_ty),
        mask=is_out[:, None] & is_in[None, :],
    )


@_jit
def _to_selector(
    U, V, new_U, new_V, selector, grad, by_selector, by_U,
    outputs, inputs, old, new, channels,
    POSITIONS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """A share of the selector's gradient, that of some outputs, and new factors' by U."""
    first_new = tl.cdiv(old, RANK)
    tile, part = tl.program_id(0), tl.program_id(1)
    is_new = tile >= first_new
    r = (tile - tl.where(is_new, first_new, 0)) * RANK + tl.arange(0, RANK)
    count = tl.where(is_new, new, old)
    if is_new:
        us, vs = new_U, new_V
    else:
        us, vs = U, V
    o = part * OUT + tl.arange(0, OUT)
    has, is_out = r < count, o < outputs
    seen = tl.zeros((RANK, OUT), tl.float32)  # the gradient, as V sees it
    for start in range(0, inputs, IN):
        i = start + tl.arange(0, IN)
        is_in = i < inputs
        v = tl.load(
            vs + r[:, None] * inputs + i[None, :], mask=has[:, None] & is_in[None, :], other=0
        )
        g = tl.load(
            grad + _place(o[None, :], i[:, None], inputs, channels, POSITIONS),
            mask=is_out[None, :] & is_in[:, None],
            other=0,
        ).to(tl.float32)
        seen += tl.dot(v, g, input_precision="tf32")
    u = tl.load(
        us + r[:, None] * outputs + o[None, :], mask=has[:, None] & is_out[None, :], other=0
    )
    at = r + tl.where(is_new, old, 0)
    tl.store(by_selector + part * (old + new) + at, tl.sum(u * seen, 1), mask=has)
    s = tl.load(selector + at, mask=has, other=0)
    tl.store(
        by_U + r[:, None] * outputs + o[None, :],
        seen * s[:, None],
        mask=is_new & has[:, None] & is_out[None, :],
    )


@_jit
def _to_V(
    new_U, selector, grad, by_V, outputs, inputs, old, new, channels,
    POSITIONS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * RANK + tl.arange(0, RANK)
    i = tl.program_id(1) * IN + tl.arange(0, IN)
    has, is_in = r < new, i < inputs
    total = tl.zeros((RANK, IN), tl.float32)
    for start in range(0, outputs, OUT):
        o = start + tl.arange(0, OUT)
        is_out = o < outputs
        u = tl.load(
            new_U + r[:, None] * outputs + o[None, :],
            mask=has[:, None] & is_out[None, :],
            other=0,
        )
        g = tl.load(
            grad + _place(o[:, None], i[None, :], inputs, channels, POSITIONS),
            mask=is_out[:, None] & is_in[None, :],
            other=0,
        ).to(tl.float32)
        total += tl.dot(u, g, input_precision="tf32")
    s = tl.load(selector + old + r, mask=has, other=0)
    tl.store(
        by_V + r[:, None] * inputs + i[None, :],
        total * s[:, None],
        mask=has[:, None] & is_in[None, :],
    )

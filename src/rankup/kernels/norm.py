"""Batch norms in training, of channels-last images. Forward and backward passes take four launches,
where torch's own operations take seven longer ones."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankup.kernels import refuse_second_derivatives

_ROWS = 256  # positions of images that a program handles together
_CHANNELS = 32
# An input is divided into at most this many parts, one per program. Few parts leave room on the GPU
# for other seeds that train at the same time, and each program sums up the results of all parts.
_PARTS = 64
_WARPS = 8
_EVEN = 4  # channels that are read together are this many or twice as many
_DTYPES = (torch.bfloat16, torch.float32)


def fits(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> bool:
    """Whether `batch_norm` takes these arguments of `F.batch_norm`."""
    running = [row for row in (running_mean, running_var) if row is not None]
    return (
        training
        and x.dim() == 4
        and x.dtype in _DTYPES
        and x.shape[1] % _EVEN == 0
        and x.shape[1] < x.numel() < 2**31  # indexed by kernels in 32 bits
        and x.is_contiguous(memory_format=torch.channels_last)
        and weight is not None
        and bias is not None
        and len(running) != 1
        and all(_is_of_channels(row, x.shape[1]) for row in (weight, bias, *running))
    )


def _is_of_channels(row: Tensor, channels: int) -> bool:
    return row.shape == (channels,) and row.dtype == torch.float32 and row.is_contiguous()


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Like `F.batch_norm` in training, for arguments that `fits`."""
    y: Tensor = _BatchNorm.apply(x, weight, bias, running_mean, running_var, momentum, eps)
    return y


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        work = _Work(x)
        parts, statistics = work.parts(), x.new_empty(2, x.shape[1], dtype=torch.float32)
        y = torch.empty_like(x)
        work.launch(_statistics, x, parts)
        work.launch(
            _normalise,
            *(x, y, parts, statistics, weight, bias),
            *(statistics if running_mean is None else running_mean,),
            *(statistics if running_var is None else running_var,),
            momentum,
            eps,
            RUNNING=running_mean is not None,
        )
        ctx.save_for_backward(x, weight, statistics)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        x, weight, statistics = ctx.saved_tensors
        grad_y = grad_y.contiguous(memory_format=torch.channels_last)
        work = _Work(x)
        parts, grad_affine = work.parts(), torch.empty_like(statistics)
        grad_x = torch.empty_like(x)
        work.launch(_to_affine, x, grad_y, parts, statistics)
        work.launch(_to_input, x, grad_y, grad_x, parts, statistics, weight, grad_affine)
        grad_bias, grad_weight = grad_affine
        return grad_x, grad_weight, grad_bias, None, None, None, None


class _Work:
    """The division of an input `x`, as a matrix `[positions, channels]`, among programs."""

    def __init__(self, x: Tensor) -> None:
        channels = x.shape[1]
        positions = x.numel() // channels
        tiles = triton.cdiv(positions, _ROWS)
        per_part = triton.cdiv(tiles, _PARTS)
        self._parts = triton.cdiv(tiles, per_part)
        even = math.gcd(channels, 2 * _EVEN)  # tells kernels how rows are aligned
        self._numbers = positions, channels // even, self._parts, per_part
        self._sizes = {
            "ROWS": _ROWS,
            "CHANNELS": _CHANNELS,
            "PARTS": _PARTS,
            "EVEN": even,
            "num_warps": _WARPS,
        }
        self._grid = self._parts, triton.cdiv(channels, _CHANNELS)
        self.x = x

    def parts(self) -> Tensor:
        """A buffer for two numbers per part and channel, `[2, parts, channels]`."""
        return self.x.new_empty(2, self._parts, self.x.shape[1], dtype=torch.float32)

    def launch(self, kernel: Any, *args: Any, **options: Any) -> None:
        kernel[self._grid](*args, *self._numbers, **options, **self._sizes)


# `n` positions, `m` channels in groups of `EVEN`, sums in `p` parts of `t` tiles each.
_sized = triton.jit(do_not_specialize=["n", "groups", "p", "t"])  # compiled once for all of them


@triton.jit
def _channels(CHANNELS: tl.constexpr):
    return tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)


@triton.jit
def _rows(tile, n, ROWS: tl.constexpr):
    """A tile's positions, and which of them exist."""
    r = tile * ROWS + tl.arange(0, ROWS)
    return r, (r < n)[:, None]


@triton.jit
def _load(at, n, m, tile, c, ROWS: tl.constexpr):
    """A tile of a matrix as floats, `[ROWS, CHANNELS]`, with zeros beyond its end."""
    r, is_row = _rows(tile, n, ROWS)
    places = at + r[:, None] * m + c[None, :]
    return tl.load(places, mask=is_row & (c < m)[None, :], other=0).to(tl.float32)


@triton.jit
def _store(at, values, n, m, tile, c, ROWS: tl.constexpr):
    r, is_row = _rows(tile, n, ROWS)
    tl.store(at + r[:, None] * m + c[None, :], values, mask=is_row & (c < m)[None, :])


@triton.jit
def _store_two(at, first, second, rows, row, m, c):
    """Write two rows into a table `[2, rows, channels]`."""
    tl.store(at + row * m + c, first, mask=c < m)
    tl.store(at + (rows + row) * m + c, second, mask=c < m)


@triton.jit
def _load_parts(at, p, m, c, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    there = (part < p)[:, None] & (c < m)[None, :]
    places = at + part[:, None] * m + c[None, :]
    return tl.load(places, mask=there, other=0), tl.load(places + p * m, mask=there, other=0)


@triton.jit
def _load_two(at, m, c):
    """Read two rows from a table `[2, channels]`."""
    return tl.load(at + c, mask=c < m, other=0), tl.load(at + m + c, mask=c < m, other=0)


@_sized
def _statistics(
    x, parts, n, groups, p, t,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write each part's mean and its sum of squared deviations from it."""
    m = groups * EVEN
    c = _channels(CHANNELS)
    part = tl.program_id(0)
    mean, squares = tl.zeros((CHANNELS,), tl.float32), tl.zeros((CHANNELS,), tl.float32)
    before = 0.0
    for tile in range(part * t, part * t + t):
        values = _load(x, n, m, tile, c, ROWS)
        count = tl.maximum(tl.minimum(n - tile * ROWS, ROWS), 0).to(tl.float32)
        own = tl.sum(values, 0) / tl.maximum(count, 1)
        _, is_row = _rows(tile, n, ROWS)
        apart = tl.where(is_row, values - own[None, :], 0.0)
        off, share = own - mean, count / tl.maximum(before + count, 1)
        squares += tl.sum(apart * apart, 0) + off * before * (off * share)
        mean += off * share
        before += count
    _store_two(parts, mean, squares, p, part, m, c)


@_sized
def _normalise(
    x, y, parts, statistics, weight, bias, running_mean, running_var, momentum, eps,
    n, groups, p, t,
    RUNNING: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    m = groups * EVEN
    c = _channels(CHANNELS)
    means, squares = _load_parts(parts, p, m, c, PARTS)
    first = tl.arange(0, PARTS) * t * ROWS
    counts = tl.maximum(tl.minimum(n - first, t * ROWS), 0).to(tl.float32)[:, None]
    mean = tl.sum(means * counts, 0) / n
    off = means - mean[None, :]
    total = tl.sum(squares + off * counts * off, 0)
    scale = 1 / tl.sqrt(total / n + eps)
    if tl.program_id(0) == 0:
        _store_two(statistics, mean, scale, 1, 0, m, c)
        if RUNNING:
            before = tl.load(running_mean + c, mask=c < m, other=0)
            tl.store(running_mean + c, before + momentum * (mean - before), mask=c < m)
            before = tl.load(running_var + c, mask=c < m, other=0)
            now = total / (n - 1)
            tl.store(running_var + c, before + momentum * (now - before), mask=c < m)
    scale *= tl.load(weight + c, mask=c < m, other=0)
    start = tl.load(bias + c, mask=c < m, other=0)
    part = tl.program_id(0)
    for tile in range(part * t, part * t + t):
        values = _load(x, n, m, tile, c, ROWS)
        values = (values - mean[None, :]) * scale[None, :] + start[None, :]
        _store(y, values, n, m, tile, c, ROWS)


@_sized
def _to_affine(
    x, grad_y, parts, statistics, n, groups, p, t,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Write each part's sums for the gradients of bias and weight."""
    m = groups * EVEN
    c = _channels(CHANNELS)
    part = tl.program_id(0)
    mean, scale = _load_two(statistics, m, c)
    grad_bias, grad_weight = tl.zeros((CHANNELS,), tl.float32), tl.zeros((CHANNELS,), tl.float32)
    for tile in range(part * t, part * t + t):
        values = _load(x, n, m, tile, c, ROWS)
        grad_values = _load(grad_y, n, m, tile, c, ROWS)
        grad_bias += tl.sum(grad_values, 0)
        grad_weight += tl.sum(grad_values * (values - mean[None, :]), 0)
    _store_two(parts, grad_bias, grad_weight * scale, p, part, m, c)


@_sized
def _to_input(
    x, grad_y, grad_x, parts, statistics, weight, grad_affine, n, groups, p, t,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    m = groups * EVEN
    c = _channels(CHANNELS)
    bias_parts, weight_parts = _load_parts(parts, p, m, c, PARTS)
    grad_bias, grad_weight = tl.sum(bias_parts, 0), tl.sum(weight_parts, 0)
    part = tl.program_id(0)
    if part == 0:
        _store_two(grad_affine, grad_bias, grad_weight, 1, 0, m, c)
    mean, scale = _load_two(statistics, m, c)
    scaled = scale * tl.load(weight + c, mask=c < m, other=0)
    for tile in range(part * t, part * t + t):
        values = _load(x, n, m, tile, c, ROWS)
        grad_values = _load(grad_y, n, m, tile, c, ROWS)
        normal = (values - mean[None, :]) * scale[None, :]
        grad_values -= (grad_bias / n)[None, :] + normal * (grad_weight / n)[None, :]
        _store(grad_x, grad_values * scaled[None, :], n, m, tile, c, ROWS)

"""Convolutions of channels-last images with few channels, as in the first stage of a thin network.
If the number of channels is not a multiple of eight, cuDNN copies all images into wider ones before
each of its three products; these kernels do not."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankup.kernels import refuse_second_derivatives

_CHANNELS = 64  # the most channels, all of which one program handles
_SEEN = 128  # the most numbers under a row of a filter, likewise
_ROWS = 64  # positions of images that a program handles together
_PARTS = 128  # a filter's gradient is summed in at most this many parts
_SUM = 64  # entries of a filter whose parts are summed up together


def fits(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> bool:
    """Whether `conv2d` takes these arguments of `F.conv2d`."""
    outputs, inputs, *size = weight.shape
    return (
        input.dim() == weight.dim() == 4
        and input.shape[1] == inputs
        and _dtype(input, weight) == torch.bfloat16
        and bias is None
        and groups == 1
        and _both(stride) in ((1, 1), (2, 2))
        and _both(dilation) == (1, 1)
        and all(side % 2 for side in size)
        and _both(padding) == tuple(side // 2 for side in size)  # centred
        and 0 < max(inputs, outputs) <= _CHANNELS
        and max(inputs, outputs) * size[1] <= _SEEN
        and bool(inputs % 8 or outputs % 8)
        and 0 < input.numel() // inputs * max(inputs, outputs) < 2**31  # indexed in 32 bits
        and input.is_contiguous(memory_format=torch.channels_last)
        and input.stride(1) == 1  # one channel fits both layouts
    )


def conv2d(
    input: Tensor, weight: Tensor, bias: None = None, stride: Any = 1, *rest: Any, **more: Any
) -> Tensor:
    """Like `F.conv2d`, for arguments that `fits`."""
    dtype = _dtype(input, weight)
    weight = weight.to(dtype).contiguous(memory_format=torch.channels_last)
    y: Tensor = _Conv.apply(input.to(dtype), weight, _both(stride)[0])
    return y


def _dtype(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """The dtype of the product, which autocast may choose; None if torch would refuse them."""
    kinds = {x.dtype, weight.dtype}
    if torch.is_autocast_enabled(x.device.type) and torch.float64 not in kinds:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype if len(kinds) == 1 else None


def _both(value: Any) -> Any:
    return tuple(value) if isinstance(value, tuple | list) else (value, value)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride = stride
        return _convolved(x, weight, weight.shape[0], stride)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        refuse_second_derivatives()
        x, weight = ctx.saved_tensors
        grad_y = grad_y.contiguous(memory_format=torch.channels_last)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = _to_weight(x, weight, grad_y, ctx.stride)
        if ctx.needs_input_grad[0]:
            grad_x = _to_input(x, weight, grad_y, ctx.stride)
        return grad_x, grad_weight, None


def _to_input(x: Tensor, weight: Tensor, grad_y: Tensor, stride: int) -> Tensor:
    if stride == 1:
        return _convolved(grad_y, weight, weight.shape[1], 1, flipped=True)
    padding = [side // 2 for side in weight.shape[2:]]
    grad_x: Tensor = torch.ops.aten.convolution_backward(
        *(grad_y, x, weight, None, [stride, stride], padding, [1, 1], False, [0, 0], 1),
        [True, False, False],
    )[0]
    return grad_x


def _convolved(
    x: Tensor, weight: Tensor, outputs: int, stride: int, flipped: bool = False
) -> Tensor:
    count, inputs, *size = x.shape
    height, width = (triton.cdiv(side, stride) for side in size)
    y = torch.empty(
        *(count, outputs, height, width),
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last,
    )
    positions = count * height * width
    _convolve[(triton.cdiv(positions, _ROWS),)](
        *(x, weight, y, positions),
        *(inputs // _unit(inputs), outputs // _unit(outputs)),
        FLIPPED=flipped,
        **_sizes(x, outputs, weight, stride),
    )
    return y


def _unit(channels: int) -> int:
    """A divisor of the number of channels that kernels are compiled for: how many numbers they read
    at once."""
    return math.gcd(channels, 4)


def _sizes(x: Tensor, outputs: int, weight: Tensor, stride: int) -> dict[str, int]:
    inputs, height, width = x.shape[1:]
    tall, wide = weight.shape[2:]
    return {
        "IN": _unit(inputs),
        "OUT": _unit(outputs),
        "HEIGHT": height,
        "WIDTH": width,
        "TALL": tall,
        "WIDE": wide,
        "STRIDE": stride,
        "ROWS": _ROWS,
        "CHANNELS": max(16, triton.next_power_of_2(outputs)),
        # Numbers under a row of the filter; a product of tensor cores takes no fewer than 16.
        "SEEN": max(16, triton.next_power_of_2(inputs * wide)),
    }


def _to_weight(x: Tensor, weight: Tensor, grad_y: Tensor, stride: int) -> Tensor:
    inputs, outputs = x.shape[1], weight.shape[0]
    positions = grad_y.numel() // outputs
    tiles = triton.cdiv(positions, _ROWS)
    per_part = triton.cdiv(tiles, _PARTS)
    parts = x.new_empty(triton.cdiv(tiles, per_part), weight.numel(), dtype=torch.float32)
    _multiply[(len(parts), weight.shape[2])](
        *(x, grad_y, parts, positions),
        *(inputs // _unit(inputs), outputs // _unit(outputs), per_part),
        **_sizes(x, outputs, weight, stride),
    )
    grad_weight = torch.empty_like(weight)
    _sum_parts[(triton.cdiv(weight.numel(), _SUM),)](
        parts, grad_weight, len(parts), weight.numel(), PARTS=_PARTS, SUM=_SUM
    )
    return grad_weight


# The pixels under a row of a filter are contiguous in memory, `[WIDE, channels]`; programs treat
# them as `SEEN` numbers. Kernels are compiled for each image size, since they divide by it often.
_sized = triton.jit(do_not_specialize=["n", "groups_in", "groups_out", "per_part"])


@triton.jit
def _column(groups, UNIT: tl.constexpr, SEEN: tl.constexpr):
    """The indices of the numbers under a row of the filter, and the columns that they are in."""
    k = tl.arange(0, SEEN)
    return k, tl.max_constancy(k // (groups * UNIT), UNIT)


@triton.jit
def _under(
    at, r, n, groups, row,
    UNIT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TALL: tl.constexpr,
    WIDE: tl.constexpr, STRIDE: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    """The pixels under one row of the filter at some positions, `[ROWS, SEEN]`, zeros beyond the
    border."""
    k, column = _column(groups, UNIT, SEEN)
    height, width = (HEIGHT - 1) // STRIDE + 1, (WIDTH - 1) // STRIDE + 1  # of positions
    y = r // width % height * STRIDE + row - TALL // 2
    left = r % width * STRIDE - WIDE // 2
    x = left[:, None] + column[None, :]
    is_there = ((r < n) & (y >= 0) & (y < HEIGHT))[:, None] & (x >= 0) & (x < WIDTH)
    first = ((r // (width * height) * HEIGHT + y) * WIDTH + left)[:, None] * (groups * UNIT)
    return tl.load(at + first + k[None, :], mask=is_there & (column < WIDE)[None, :], other=0)


@_sized
def _convolve(
    x, weight, y, n, groups_in, groups_out,
    FLIPPED: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, STRIDE: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    """Compute a convolution. `FLIPPED`, for the gradient of an input, flips the filter in all
    dimensions."""
    inputs, outputs = groups_in * IN, groups_out * OUT
    r, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, CHANNELS)
    k, column = _column(groups_in, IN, SEEN)
    is_entry = (column < WIDE)[:, None] & (c < outputs)[None, :]
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    for row in tl.static_range(TALL):
        seen = _under(x, r, n, groups_in, row, IN, HEIGHT, WIDTH, TALL, WIDE, STRIDE, SEEN)
        if FLIPPED:
            tap = TALL * WIDE - 1 - row * WIDE - column
            places = ((k % inputs * TALL * WIDE + tap) * outputs)[:, None] + c[None, :]
        else:
            places = (row * WIDE * inputs + k)[:, None] + (c * TALL * WIDE * inputs)[None, :]
        weights = tl.load(weight + places, mask=is_entry, other=0)
        total += tl.dot(seen, weights, input_precision="ieee")
    there = (r < n)[:, None] & (c < outputs)[None, :]
    tl.store(y + r[:, None] * outputs + c[None, :], total, mask=there)


@_sized
def _multiply(
    x, grad_y, parts, n, groups_in, groups_out, per_part,
    IN: tl.constexpr, OUT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, STRIDE: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    """Compute a part of the gradient of one row of a filter: `Σ grad_y · x` over some positions."""
    inputs, outputs = groups_in * IN, groups_out * OUT
    part, row = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, CHANNELS)
    total = tl.zeros((CHANNELS, SEEN), tl.float32)
    for tile in range(part * per_part, part * per_part + per_part):
        r = tile * ROWS + tl.arange(0, ROWS)
        seen = _under(x, r, n, groups_in, row, IN, HEIGHT, WIDTH, TALL, WIDE, STRIDE, SEEN)
        there = (r < n)[:, None] & (c < outputs)[None, :]
        grad_seen = tl.load(grad_y + r[:, None] * outputs + c[None, :], mask=there, other=0)
        total += tl.dot(tl.trans(grad_seen), seen, input_precision="ieee")
    k, column = _column(groups_in, IN, SEEN)
    places = parts + ((part * outputs + c) * TALL + row)[:, None] * (WIDE * inputs) + k[None, :]
    tl.store(places, total, mask=(c < outputs)[:, None] & (column < WIDE)[None, :])


@triton.jit(do_not_specialize=["p", "n"])
def _sum_parts(parts, grad_weight, p, n, PARTS: tl.constexpr, SUM: tl.constexpr):
    """Sum up the `p` parts of the gradient of a filter with `n` entries."""
    at, part = tl.program_id(0) * SUM + tl.arange(0, SUM), tl.arange(0, PARTS)
    there = (part < p)[:, None] & (at < n)[None, :]
    total = tl.sum(tl.load(parts + part[:, None] * n + at[None, :], mask=there, other=0), 0)
    tl.store(grad_weight + at, total, mask=at < n)

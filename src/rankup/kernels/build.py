"""Kernels of convolutions from their factors, and the factors' gradients from the kernels': five
launches for all layers of a network where torch's own operations take seventeen for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankup.layers import FactoredConv

_RANK = 16  # factors that are looked at together; fewer do not fill a tensor core
_OUT = 32
_IN = 64
_SUM = 128


class Factors(NamedTuple):
    """A layer's: `kernel[o, i] = Σ_r selector[r] · U[r, o] · V[r, i]` over old and new ones."""

    U: Tensor  # [R, out], frozen
    V: Tensor  # [R, in]
    new_U: Tensor
    new_V: Tensor
    selector: Tensor  # a number for each factor, the frozen ones first
    shape: tuple[int, int, int]  # channels, height and width of the kernel

    @classmethod
    def of(cls, layer: FactoredConv) -> Self:
        """Those of the task that a layer is learning."""
        height, width = layer.conv.kernel_size
        shape = layer.in_channels, height, width
        return cls(layer.U, layer.V, layer.new_U, layer.new_V, layer.new_selector, shape)

    @property
    def learned(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.new_U, self.new_V, self.selector

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """Outputs, inputs, old factors, new ones, channels and positions."""
        channels, height, width = self.shape
        outputs, inputs = self.new_U.shape[1], self.new_V.shape[1]
        return outputs, inputs, len(self.U), len(self.new_U), channels, height * width


class Builder:
    """For tensors that stay where they are, whatever becomes of the numbers in them: kernels know
    them by their addresses."""

    def __init__(self, layers: Sequence[Factors]) -> None:
        self.layers = layers
        self._kernels = [_kernel(layer) for layer in layers]
        self._by_kernels = [_kernel(layer) for layer in layers]
        self._by_learned = [[torch.empty_like(t) for t in layer.learned] for layer in layers]
        self._parts = [
            layer.selector.new_empty(triton.cdiv(layer.sizes[0], _OUT), len(layer.selector))
            for layer in layers
        ]
        groups = zip(
            layers, self._kernels, self._by_kernels, self._by_learned, self._parts, strict=True
        )
        self._pointers = self._table(
            [
                [t.data_ptr() for t in (*layer[:5], kernel, by_kernel, *by_learned, parts)]
                for layer, kernel, by_kernel, by_learned, parts in groups
            ],
            torch.int64,
        )
        self._sizes = self._table([layer.sizes for layer in layers], torch.int32)
        kinds = (_forward_tiles, _selector_tiles, _V_tiles, _sum_tiles)
        self._tiles = {
            kind: self._table(
                [(n, *tile) for n, layer in enumerate(layers) for tile in kind(*layer.sizes[:4])],
                torch.int32,
            )
            for kind in kinds
        }

    def __call__(self) -> Sequence[Tensor]:
        """`[out, channels, height, width]` for each layer, in bfloat16 and channels-last order,
        multiplied in tf32."""
        learned = [tensor for layer in self.layers for tensor in layer.learned]
        kernels: Sequence[Tensor] = _Build.apply(self, *learned)
        return kernels

    def forward(self) -> Sequence[Tensor]:
        self._launch(_forward, _forward_tiles)
        return self._kernels

    def backward(self, grads: Sequence[Tensor]) -> Iterator[Tensor]:
        """Gradients by each layer's learned tensors."""
        torch._foreach_copy_(self._by_kernels, list(grads))
        self._launch(_to_selector, _selector_tiles)
        self._launch(_to_V, _V_tiles)
        self._launch(_sum_parts, _sum_tiles)
        for by_learned in self._by_learned:
            yield from by_learned

    def _launch(self, kernel: Any, kind: Any) -> None:
        tiles = self._tiles[kind]
        kernel[(len(tiles),)](
            self._pointers, self._sizes, tiles, OUT=_OUT, IN=_IN, RANK=_RANK, SUM=_SUM
        )

    def _table(self, rows: Sequence[Sequence[int]], dtype: torch.dtype) -> Tensor:
        return torch.tensor(rows, dtype=dtype, device=self.layers[0].U.device)


class _Build(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, builder: Builder, *learned: Tensor) -> tuple[Tensor, ...]:
        ctx.builder = builder
        return tuple(kernel.detach() for kernel in builder.forward())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.builder.backward(grads)


def _kernel(layer: Factors) -> Tensor:
    return torch.empty(
        layer.new_U.shape[1],
        *layer.shape,
        dtype=torch.bfloat16,
        device=layer.U.device,
        memory_format=torch.channels_last,
    )


# What each program does: of which rows and columns. New factors are looked at after the old ones,
# from a tile of their own on.


def _forward_tiles(outputs: int, inputs: int, old: int, new: int) -> Iterator[tuple[int, int]]:
    for o in range(0, outputs, _OUT):
        for i in range(0, inputs, _IN):
            yield o, i


def _selector_tiles(outputs: int, inputs: int, old: int, new: int) -> Iterator[tuple[int, int]]:
    for part in range(triton.cdiv(outputs, _OUT)):
        for r in [*range(0, old, _RANK), *range(old, old + new, _RANK)]:
            yield r, part


def _V_tiles(outputs: int, inputs: int, old: int, new: int) -> Iterator[tuple[int, int]]:
    for r in range(0, new, _RANK):
        for i in range(0, inputs, _IN):
            yield r, i


def _sum_tiles(outputs: int, inputs: int, old: int, new: int) -> Iterator[tuple[int, int]]:
    for r in range(0, old + new, _SUM):
        yield r, 0


@triton.jit
def _tile(tiles):
    at = tiles + 3 * tl.program_id(0)
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def _floats(pointers, layer, column: tl.constexpr):
    return tl.load(pointers + 11 * layer + column).to(tl.pointer_type(tl.float32))


@triton.jit
def _halves(pointers, layer, column: tl.constexpr):
    return tl.load(pointers + 11 * layer + column).to(tl.pointer_type(tl.bfloat16))


@triton.jit
def _size(sizes, layer, column: tl.constexpr):
    return tl.load(sizes + 6 * layer + column)


@triton.jit
def _place(sizes, layer, o, i):
    """Where an entry of the matrix `[out, in]` is in a kernel that is stored channels last."""
    inputs, channels, positions = (
        _size(sizes, layer, 1),
        _size(sizes, layer, 4),
        _size(sizes, layer, 5),
    )
    return o * inputs + (i % positions) * channels + i // positions


@triton.jit
def _product(
    us,
    vs,
    selector,
    count,
    outputs,
    inputs,
    o,
    i,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    RANK: tl.constexpr,
):
    """Σ_r selector[r] · us[r, o] · vs[r, i] over so many factors."""
    total = tl.zeros((OUT, IN), tl.float32)
    is_out, is_in = o < outputs, i < inputs
    for start in range(0, count, RANK):
        r = start + tl.arange(0, RANK)
        has = r < count
        u = tl.load(
            us + r[None, :] * outputs + o[:, None], mask=has[None, :] & is_out[:, None], other=0
        )
        s = tl.load(selector + r, mask=has, other=0)
        v = tl.load(
            vs + r[:, None] * inputs + i[None, :], mask=has[:, None] & is_in[None, :], other=0
        )
        total += tl.dot(u * s[None, :], v, input_precision="tf32")
    return total


@triton.jit
def _forward(
    pointers,
    sizes,
    tiles,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    RANK: tl.constexpr,
    SUM: tl.constexpr,
):
    layer, first_o, first_i = _tile(tiles)
    outputs, inputs = _size(sizes, layer, 0), _size(sizes, layer, 1)
    old, new = _size(sizes, layer, 2), _size(sizes, layer, 3)
    o, i = first_o + tl.arange(0, OUT), first_i + tl.arange(0, IN)
    selector = _floats(pointers, layer, 4)
    U, V = _floats(pointers, layer, 0), _floats(pointers, layer, 1)
    kernel = _product(U, V, selector, old, outputs, inputs, o, i, OUT, IN, RANK)
    new_U, new_V = _floats(pointers, layer, 2), _floats(pointers, layer, 3)
    kernel += _product(new_U, new_V, selector + old, new, outputs, inputs, o, i, OUT, IN, RANK)
    tl.store(
        _halves(pointers, layer, 5) + _place(sizes, layer, o[:, None], i[None, :]),
        kernel.to(tl.bfloat16),
        mask=(o < outputs)[:, None] & (i < inputs)[None, :],
    )


@triton.jit
def _to_selector(
    pointers,
    sizes,
    tiles,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    RANK: tl.constexpr,
    SUM: tl.constexpr,
):
    """A share of the selector's gradient, that of some outputs, and new factors' by U."""
    layer, first, part = _tile(tiles)
    outputs, inputs = _size(sizes, layer, 0), _size(sizes, layer, 1)
    old, new = _size(sizes, layer, 2), _size(sizes, layer, 3)
    is_new = first >= old
    if is_new:
        us, vs = _floats(pointers, layer, 2), _floats(pointers, layer, 3)
    else:
        us, vs = _floats(pointers, layer, 0), _floats(pointers, layer, 1)
    at = first + tl.arange(0, RANK)  # among all factors
    r = at - tl.where(is_new, old, 0)  # among old or new ones
    has = r < tl.where(is_new, new, old)
    o = part * OUT + tl.arange(0, OUT)
    is_out = o < outputs
    grad = _halves(pointers, layer, 6)
    seen = tl.zeros((RANK, OUT), tl.float32)  # the gradient, as V sees it
    for start in range(0, inputs, IN):
        i = start + tl.arange(0, IN)
        is_in = i < inputs
        v = tl.load(
            vs + r[:, None] * inputs + i[None, :], mask=has[:, None] & is_in[None, :], other=0
        )
        g = tl.load(
            grad + _place(sizes, layer, o[None, :], i[:, None]),
            mask=is_out[None, :] & is_in[:, None],
            other=0,
        )
        seen += tl.dot(v, g.to(tl.float32), input_precision="tf32")
    u = tl.load(
        us + r[:, None] * outputs + o[None, :], mask=has[:, None] & is_out[None, :], other=0
    )
    tl.store(_floats(pointers, layer, 10) + part * (old + new) + at, tl.sum(u * seen, 1), mask=has)
    s = tl.load(_floats(pointers, layer, 4) + at, mask=has, other=0)
    tl.store(
        _floats(pointers, layer, 7) + r[:, None] * outputs + o[None, :],
        seen * s[:, None],
        mask=is_new & has[:, None] & is_out[None, :],
    )


@triton.jit
def _to_V(
    pointers,
    sizes,
    tiles,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    RANK: tl.constexpr,
    SUM: tl.constexpr,
):
    layer, first_r, first_i = _tile(tiles)
    outputs, inputs = _size(sizes, layer, 0), _size(sizes, layer, 1)
    old, new = _size(sizes, layer, 2), _size(sizes, layer, 3)
    r, i = first_r + tl.arange(0, RANK), first_i + tl.arange(0, IN)
    has, is_in = r < new, i < inputs
    new_U, grad = _floats(pointers, layer, 2), _halves(pointers, layer, 6)
    total = tl.zeros((RANK, IN), tl.float32)
    for start in range(0, outputs, OUT):
        o = start + tl.arange(0, OUT)
        is_out = o < outputs
        u = tl.load(
            new_U + r[:, None] * outputs + o[None, :], mask=has[:, None] & is_out[None, :], other=0
        )
        g = tl.load(
            grad + _place(sizes, layer, o[:, None], i[None, :]),
            mask=is_out[:, None] & is_in[None, :],
            other=0,
        )
        total += tl.dot(u, g.to(tl.float32), input_precision="tf32")
    s = tl.load(_floats(pointers, layer, 4) + old + r, mask=has, other=0)
    tl.store(
        _floats(pointers, layer, 8) + r[:, None] * inputs + i[None, :],
        total * s[:, None],
        mask=has[:, None] & is_in[None, :],
    )


@triton.jit
def _sum_parts(
    pointers,
    sizes,
    tiles,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    RANK: tl.constexpr,
    SUM: tl.constexpr,
):
    layer, first, _ = _tile(tiles)
    outputs, rank = _size(sizes, layer, 0), _size(sizes, layer, 2) + _size(sizes, layer, 3)
    r = first + tl.arange(0, SUM)
    total = tl.zeros((SUM,), tl.float32)
    for part in range(0, tl.cdiv(outputs, OUT)):
        total += tl.load(_floats(pointers, layer, 10) + part * rank + r, mask=r < rank, other=0)
    tl.store(_floats(pointers, layer, 9) + r, total, mask=r < rank)

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

_MANY = 512  # factors of a layer from which on its products are large ones
_SUM = 128  # factors whose gradients are summed up together


class Tiling(NamedTuple):
    """What a program of a kernel does at once."""

    outputs: int
    inputs: int
    rank: int  # factors; fewer than 16 do not fill a tensor core
    warps: int
    even: int = 1  # outputs and inputs are known to be multiples of this


_FEW = Tiling(outputs=32, inputs=64, rank=16, warps=4)
_FORWARD = Tiling(outputs=128, inputs=128, rank=32, warps=8)
_BACKWARD = Tiling(outputs=128, inputs=64, rank=64, warps=8, even=4)


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
    def has_many(self) -> bool:
        """Whether its products are worth tiles of their own; these want rows that are aligned."""
        return len(self.U) > _MANY and self.new_U.shape[1] % 4 == self.new_V.shape[1] % 4 == 0

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
        many = [layer.has_many for layer in layers]
        self._groups = [
            _Group([layer for layer, own in zip(layers, many, strict=True) if own == kind], kind)
            for kind in sorted(set(many))
        ]
        self._many = many

    def __call__(self) -> Sequence[Tensor]:
        """`[out, channels, height, width]` for each layer, in bfloat16 and channels-last order,
        multiplied in tf32."""
        learned = [tensor for layer in self.layers for tensor in layer.learned]
        kernels: Sequence[Tensor] = _Build.apply(self, *learned)
        return kernels

    def forward(self) -> Sequence[Tensor]:
        found = {group.many: iter(group.forward()) for group in self._groups}
        return [next(found[own]) for own in self._many]

    def backward(self, grads: Sequence[Tensor]) -> Iterator[Tensor]:
        """Gradients by each layer's learned tensors."""
        found = {}
        for group in self._groups:
            own = [grad for grad, many in zip(grads, self._many, strict=True) if many == group.many]
            found[group.many] = iter(group.backward(own))
        for many in self._many:
            yield from next(found[many])


class _Group:
    """Layers whose kernels are built in the same launches."""

    def __init__(self, layers: Sequence[Factors], many: bool) -> None:
        self.many = many
        self._kernels = [_kernel(layer) for layer in layers]
        self._by_kernels = [_kernel(layer) for layer in layers]
        by_weights = [kernel.new_empty(kernel.numel()) for kernel in self._kernels]
        self._by_learned = [[torch.empty_like(t) for t in layer.learned] for layer in layers]
        forward, backward = (_FORWARD, _BACKWARD) if many else (_FEW, _FEW)
        parts = [
            layer.selector.new_empty(
                triton.cdiv(layer.sizes[0], backward.outputs), len(layer.selector)
            )
            for layer in layers
        ]
        self._by_weights, self._parts = by_weights, parts  # kernels know but their addresses
        groups = zip(
            layers,
            self._kernels,
            self._by_kernels,
            self._by_learned,
            parts,
            by_weights,
            strict=True,
        )
        device = layers[0].U.device
        self._floats, self._halves = layers[0].selector, self._kernels[0]
        self._places = torch.tensor(
            [
                [
                    self._place(t)
                    for t in (*layer[:5], kernel, by_kernel, *by_learned, part, by_weight)
                ]
                for layer, kernel, by_kernel, by_learned, part, by_weight in groups
            ],
            dtype=torch.int64,
            device=device,
        )
        sizes = [layer.sizes for layer in layers]
        self._sizes = torch.tensor(sizes, dtype=torch.int32, device=device)
        self._work = {
            kernel: self._tiles(kind, tiling, sizes, device)
            for kernel, kind, tiling in (
                (_forward, _weight_tiles, forward),
                (_in_order, _weight_tiles, _FEW),
                (_to_selector, _factor_tiles, backward),
                (_to_V, _new_tiles, _FEW),
                (_sum_parts, _sum_tiles, backward),
            )
        }

    def forward(self) -> Sequence[Tensor]:
        self._launch(_forward)
        return self._kernels

    def backward(self, grads: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
        torch._foreach_copy_(self._by_kernels, list(grads))
        for kernel in (_in_order, _to_selector, _to_V, _sum_parts):
            self._launch(kernel)
        return self._by_learned

    def _launch(self, kernel: Any) -> None:
        tiling, tiles = self._work[kernel]
        kernel[(len(tiles),)](
            self._floats,
            self._halves,
            self._places,
            self._sizes,
            tiles,
            OUT=tiling.outputs,
            IN=tiling.inputs,
            RANK=tiling.rank,
            SUM=_SUM,
            EVEN=tiling.even,
            num_warps=tiling.warps,
        )

    def _place(self, tensor: Tensor) -> int:
        base = self._floats if tensor.dtype == torch.float32 else self._halves
        distance, rest = divmod(tensor.data_ptr() - base.data_ptr(), 8 * tensor.element_size())
        assert rest == 0 or tensor.numel() == 0
        return distance

    @staticmethod
    def _tiles(
        kind: Any, tiling: Tiling, sizes: Any, device: torch.device
    ) -> tuple[Tiling, Tensor]:
        rows = [(n, *tile) for n, own in enumerate(sizes) for tile in kind(tiling, *own[:4])]
        return tiling, torch.tensor(rows, dtype=torch.int32, device=device)


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


def _weight_tiles(
    of: Tiling, outputs: int, inputs: int, old: int, new: int
) -> Iterator[tuple[int, int]]:
    for o in range(0, outputs, of.outputs):
        for i in range(0, inputs, of.inputs):
            yield o, i


def _factor_tiles(
    of: Tiling, outputs: int, inputs: int, old: int, new: int
) -> Iterator[tuple[int, int]]:
    for part in range(triton.cdiv(outputs, of.outputs)):
        for r in [*range(0, old, of.rank), *range(old, old + new, of.rank)]:
            yield r, part


def _new_tiles(
    of: Tiling, outputs: int, inputs: int, old: int, new: int
) -> Iterator[tuple[int, int]]:
    for r in range(0, new, of.rank):
        for i in range(0, inputs, of.inputs):
            yield r, i


def _sum_tiles(
    of: Tiling, outputs: int, inputs: int, old: int, new: int
) -> Iterator[tuple[int, int]]:
    for r in range(0, old + new, _SUM):
        yield r, 0


@triton.jit
def _tile(tiles):
    at = tiles + 3 * tl.program_id(0)
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def _of(base, places, layer, column: tl.constexpr):
    """Where a layer's tensor begins; all are aligned, which nothing but a product shows."""
    return base + tl.load(places + 12 * layer + column) * 8


@triton.jit
def _size(sizes, layer, column: tl.constexpr):
    return tl.load(sizes + 6 * layer + column)


@triton.jit
def _even(sizes, layer, column: tl.constexpr, EVEN: tl.constexpr):
    return _size(sizes, layer, column) // EVEN * EVEN


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
    floats,
    halves,
    places,
    sizes,
    tiles,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    RANK: tl.constexpr,
    SUM: tl.constexpr,
    EVEN: tl.constexpr,
):
    layer, first_o, first_i = _tile(tiles)
    outputs, inputs = _even(sizes, layer, 0, EVEN), _even(sizes, layer, 1, EVEN)
    old, new = _size(sizes, layer, 2), _size(sizes, layer, 3)
    o, i = first_o // OUT * OUT + tl.arange(0, OUT), first_i // IN * IN + tl.arange(0, IN)
    selector = _of(floats, places, layer, 4)
    U, V = _of(floats, places, layer, 0), _of(floats, places, layer, 1)
    kernel = _product(U, V, selector, old, outputs, inputs, o, i, OUT, IN, RANK)
    new_U, new_V = _of(floats, places, layer, 2), _of(floats, places, layer, 3)
    kernel += _product(new_U, new_V, selector + old, new, outputs, inputs, o, i, OUT, IN, RANK)
    tl.store(
        _of(halves, places, layer, 5) + _place(sizes, layer, o[:, None], i[None, :]),
        kernel.to(tl.bfloat16),
        mask=(o < outputs)[:, None] & (i < inputs)[None, :],
    )


@triton.jit
def _in_order(
    floats,
    halves,
    places,
    sizes,
    tiles,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    RANK: tl.constexpr,
    SUM: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The gradient by a kernel as one by the matrix: what reads it, reads it many times."""
    layer, first_o, first_i = _tile(tiles)
    outputs, inputs = _even(sizes, layer, 0, EVEN), _even(sizes, layer, 1, EVEN)
    o, i = first_o + tl.arange(0, OUT)[:, None], first_i + tl.arange(0, IN)[None, :]
    there = (o < outputs) & (i < inputs)
    grad = tl.load(_of(halves, places, layer, 6) + _place(sizes, layer, o, i), mask=there, other=0)
    tl.store(_of(halves, places, layer, 11) + o * inputs + i, grad, mask=there)


@triton.jit
def _to_selector(
    floats,
    halves,
    places,
    sizes,
    tiles,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    RANK: tl.constexpr,
    SUM: tl.constexpr,
    EVEN: tl.constexpr,
):
    """A share of the selector's gradient, that of some outputs, and new factors' by U."""
    layer, first, part = _tile(tiles)
    outputs, inputs = _even(sizes, layer, 0, EVEN), _even(sizes, layer, 1, EVEN)
    old, new = _size(sizes, layer, 2), _size(sizes, layer, 3)
    is_new = first >= old
    if is_new:
        us, vs = _of(floats, places, layer, 2), _of(floats, places, layer, 3)
    else:
        us, vs = _of(floats, places, layer, 0), _of(floats, places, layer, 1)
    at = first + tl.arange(0, RANK)  # among all factors
    r = at - tl.where(is_new, old, 0)  # among old or new ones
    has = r < tl.where(is_new, new, old)
    o = part * OUT + tl.arange(0, OUT)
    is_out = o < outputs
    grad = _of(halves, places, layer, 11)
    seen = tl.zeros((RANK, OUT), tl.float32)  # the gradient, as V sees it
    for start in range(0, inputs, IN):
        i = start + tl.arange(0, IN)
        is_in = i < inputs
        v = tl.load(
            vs + r[:, None] * inputs + i[None, :], mask=has[:, None] & is_in[None, :], other=0
        )
        g = tl.load(
            grad + o[None, :] * inputs + i[:, None],
            mask=is_out[None, :] & is_in[:, None],
            other=0,
        )
        seen += tl.dot(v, g.to(tl.float32), input_precision="tf32")
    u = tl.load(
        us + r[:, None] * outputs + o[None, :], mask=has[:, None] & is_out[None, :], other=0
    )
    tl.store(
        _of(floats, places, layer, 10) + part * (old + new) + at, tl.sum(u * seen, 1), mask=has
    )
    s = tl.load(_of(floats, places, layer, 4) + at, mask=has, other=0)
    tl.store(
        _of(floats, places, layer, 7) + r[:, None] * outputs + o[None, :],
        seen * s[:, None],
        mask=is_new & has[:, None] & is_out[None, :],
    )


@triton.jit
def _to_V(
    floats,
    halves,
    places,
    sizes,
    tiles,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    RANK: tl.constexpr,
    SUM: tl.constexpr,
    EVEN: tl.constexpr,
):
    layer, first_r, first_i = _tile(tiles)
    outputs, inputs = _even(sizes, layer, 0, EVEN), _even(sizes, layer, 1, EVEN)
    old, new = _size(sizes, layer, 2), _size(sizes, layer, 3)
    r, i = first_r + tl.arange(0, RANK), first_i + tl.arange(0, IN)
    has, is_in = r < new, i < inputs
    new_U, grad = _of(floats, places, layer, 2), _of(halves, places, layer, 11)
    total = tl.zeros((RANK, IN), tl.float32)
    for start in range(0, outputs, OUT):
        o = start + tl.arange(0, OUT)
        is_out = o < outputs
        u = tl.load(
            new_U + r[:, None] * outputs + o[None, :], mask=has[:, None] & is_out[None, :], other=0
        )
        g = tl.load(
            grad + o[:, None] * inputs + i[None, :],
            mask=is_out[:, None] & is_in[None, :],
            other=0,
        )
        total += tl.dot(u, g.to(tl.float32), input_precision="tf32")
    s = tl.load(_of(floats, places, layer, 4) + old + r, mask=has, other=0)
    tl.store(
        _of(floats, places, layer, 8) + r[:, None] * inputs + i[None, :],
        total * s[:, None],
        mask=has[:, None] & is_in[None, :],
    )


@triton.jit
def _sum_parts(
    floats,
    halves,
    places,
    sizes,
    tiles,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    RANK: tl.constexpr,
    SUM: tl.constexpr,
    EVEN: tl.constexpr,
):
    layer, first, _ = _tile(tiles)
    outputs, rank = _size(sizes, layer, 0), _size(sizes, layer, 2) + _size(sizes, layer, 3)
    r = first + tl.arange(0, SUM)
    total = tl.zeros((SUM,), tl.float32)
    for part in range(0, tl.cdiv(outputs, OUT)):
        total += tl.load(_of(floats, places, layer, 10) + part * rank + r, mask=r < rank, other=0)
    tl.store(_of(floats, places, layer, 9) + r, total, mask=r < rank)

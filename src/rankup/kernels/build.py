"""Weights of convolutions from their factors, and gradients of the factors from those of weights.
This takes five or six launches for all layers of a network, where torch's own operations take
seventeen for each layer.

Layers with many factors multiply them in sixteen bits, the precision of the resulting weight. Most
of these factors are seeded, and lose nothing by it, since they are signs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from rankup.kernels import products, refuse_second_derivatives
from rankup.layers import FactoredConv

_MANY = 512  # a layer with more factors than this has large products
_SUM = 128  # factors whose gradients are summed up together
_SHARED = 96 * 1024  # bytes of shared memory that large tiles take
_EVEN = 8  # numbers of sixteen bits that are read at once


class Tiling(NamedTuple):
    """How many outputs, inputs and factors a program of a kernel handles at once."""

    outputs: int
    inputs: int
    rank: int  # factors; fewer than 16 do not fill a tensor core
    warps: int
    even: int = 1  # outputs and inputs are known to be multiples of this


_FEW = Tiling(outputs=32, inputs=64, rank=16, warps=4)
_FORWARD = Tiling(outputs=128, inputs=128, rank=64, warps=8, even=_EVEN)
_BACKWARD = Tiling(outputs=128, inputs=64, rank=128, warps=8, even=_EVEN)
_HALVE = Tiling(outputs=64, inputs=64, rank=64, warps=4, even=_EVEN)
_HALF = tl.bfloat16
_BACK = (products.in_order, products.to_selector, products.to_V, products.sum_parts)


class Factors(NamedTuple):
    """A layer's factors: `weight[o, i] = Σ_r selector[r] · U[r, o] · V[r, i]`, over `R` frozen and
    `N` new ones."""

    U: Tensor  # [R, out], frozen
    V: Tensor  # [R, in], frozen
    new_U: Tensor  # [N, out]
    new_V: Tensor  # [N, in]
    selector: Tensor  # [R + N]
    shape: tuple[int, int, int]  # channels, height and width of the filters
    seeded: int = 0  # how many frozen factors, the first ones, are signs times a constant

    @classmethod
    def of(cls, layer: FactoredConv) -> Self:
        """The factors of the task that a layer is learning."""
        height, width = layer.conv.kernel_size
        shape = layer.in_channels, height, width
        learned = layer.new_U, layer.new_V, layer.new_selector
        return cls(layer.old_U, layer.old_V, *learned, shape, layer.spec.rank.seeded)

    @property
    def learned(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.new_U, self.new_V, self.selector

    @property
    def has_many(self) -> bool:
        """Whether it has so many factors that large tiles are faster, and aligned rows for them."""
        outputs, inputs = self.new_U.shape[1], self.new_V.shape[1]
        return len(self.U) > _MANY and outputs % _EVEN == inputs % _EVEN == 0

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """Outputs, inputs, old factors, new ones, channels, positions and seeded factors."""
        channels, height, width = self.shape
        outputs, inputs = self.new_U.shape[1], self.new_V.shape[1]
        old, new = len(self.U), len(self.new_U)
        return outputs, inputs, old, new, channels, height * width, self.seeded


class Builder:
    """Builds the weights of layers from their factors. Tensors are known by their addresses: their
    values may change, but they must not be replaced by others.

    Args:
        layers: whose tensors are on one device.
    """

    def __init__(self, layers: Sequence[Factors]) -> None:
        self.layers = layers
        has_room = _has_room(layers[0].U.device)
        self._many = many = [has_room and layer.has_many for layer in layers]
        self._groups = [
            _Group(
                [layer for layer, has_many in zip(layers, many, strict=True) if has_many == kind],
                kind,
            )
            for kind in sorted(set(many))
        ]

    def __call__(self) -> Sequence[Tensor]:
        """The weight of each layer, `[out, channels, height, width]`, in bfloat16 and channels-last
        order. Products are in tf32 or, for layers with many factors, in bfloat16."""
        learned = [tensor for layer in self.layers for tensor in layer.learned]
        weights: Sequence[Tensor] = _Build.apply(self, *learned)
        return weights

    def forward(self) -> Sequence[Tensor]:
        weights = {group.many: iter(group.forward()) for group in self._groups}
        return [next(weights[many]) for many in self._many]

    def backward(self, grads: Sequence[Tensor]) -> Iterator[Tensor]:
        """Gradients of each layer's learned tensors."""
        gradients = {}
        for group in self._groups:
            wanted = [
                grad for grad, many in zip(grads, self._many, strict=True) if many == group.many
            ]
            gradients[group.many] = iter(group.backward(wanted))
        for many in self._many:
            yield from next(gradients[many])


def _has_room(device: torch.device) -> bool:
    """Whether a GPU has enough shared memory for large tiles."""
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0) >= _SHARED


class _Buffers(NamedTuple):
    """Buffers for tensors that are computed from a layer's factors."""

    weight: Tensor
    grad_weight: Tensor
    grad_U: Tensor
    grad_V: Tensor
    grad_selector: Tensor
    parts: Tensor  # [P, R + N]: the selector's gradient over each part of the outputs
    grad_matrix: Tensor  # grad_weight as a matrix [out, in]
    half_U: Tensor  # [R + N, out], in sixteen bits, times selector and scale; empty without many
    half_V: Tensor  # [R + N, in], in sixteen bits, with 1 and −1 for seeded factors

    @classmethod
    def of(cls, layer: Factors, backward: Tiling, many: bool) -> Self:
        weight = torch.empty(
            layer.new_U.shape[1],
            *layer.shape,
            dtype=torch.bfloat16,
            device=layer.U.device,
            memory_format=torch.channels_last,
        )
        grad_U, grad_V, grad_selector = map(torch.empty_like, layer.learned)
        parts = triton.cdiv(layer.sizes[0], backward.outputs), len(layer.selector)
        grad_matrix = weight.new_empty(weight.numel())
        half_U, half_V = (
            weight.new_empty(len(layer.selector) if many else 0, table.shape[1])
            for table in (layer.U, layer.V)
        )
        if many:
            half_V[: layer.seeded] = layer.V[: layer.seeded].sign()
        return cls(
            weight,
            torch.empty_like(weight),
            grad_U,
            grad_V,
            grad_selector,
            layer.selector.new_empty(parts),
            grad_matrix,
            half_U,
            half_V,
        )

    @property
    def grad_learned(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.grad_U, self.grad_V, self.grad_selector


class _Group:
    """Layers whose weights are built in the same launches."""

    def __init__(self, layers: Sequence[Factors], many: bool) -> None:
        self.many = many
        forward, backward = (_FORWARD, _BACKWARD) if many else (_FEW, _FEW)
        self._buffers = [_Buffers.of(layer, backward, many) for layer in layers]
        # Kernels find tensors by their offset, in eights, from one of the same dtype.
        self._floats, self._halves = layers[0].selector, self._buffers[0].weight
        pairs = zip(layers, self._buffers, strict=True)
        places = [[self._offset(t) for t in (*layer[:5], *buffers)] for layer, buffers in pairs]
        device = layers[0].U.device
        self._places = torch.tensor(places, dtype=torch.int64, device=device)
        sizes = [layer.sizes for layer in layers]
        self._sizes = torch.tensor(sizes, dtype=torch.int32, device=device)
        self._work = {
            kernel: self._tiles(kind, tiling, sizes, device)
            for kernel, kind, tiling in (
                (products.halve, _row_tiles, _HALVE),
                (products.weights, _weight_tiles, forward),
                (products.in_order, _weight_tiles, _FEW),
                (products.to_selector, _factor_tiles, backward),
                (products.to_V, _new_tiles, _FEW),
                (products.sum_parts, _sum_tiles, backward),
            )
        }

    def forward(self) -> Sequence[Tensor]:
        if self.many:
            self._launch(products.halve)
        self._launch(products.weights)
        return [buffers.weight for buffers in self._buffers]

    def backward(self, grads: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
        torch._foreach_copy_([buffers.grad_weight for buffers in self._buffers], list(grads))
        for kernel in _BACK:
            self._launch(kernel)
        return [buffers.grad_learned for buffers in self._buffers]

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
            HALF=_HALF if self.many else None,
            SUM=_SUM,
            EVEN=tiling.even,
            num_warps=tiling.warps,
        )

    def _offset(self, tensor: Tensor) -> int:
        base = self._floats if tensor.dtype == torch.float32 else self._halves
        distance, rest = divmod(tensor.data_ptr() - base.data_ptr(), 8 * tensor.element_size())
        assert rest == 0 or tensor.numel() == 0
        return distance

    @staticmethod
    def _tiles(
        kind: Any, tiling: Tiling, sizes: Any, device: torch.device
    ) -> tuple[Tiling, Tensor]:
        rows = [(n, *tile) for n, size in enumerate(sizes) for tile in kind(tiling, *size[:4])]
        # Programs that take longest start first, so that fewer are left running alone in the end.
        rows.sort(key=lambda row: sizes[row[0]][1], reverse=True)
        return tiling, torch.tensor(rows, dtype=torch.int32, device=device)


class _Build(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, builder: Builder, *learned: Tensor) -> tuple[Tensor, ...]:
        ctx.builder = builder
        return tuple(weight.detach() for weight in builder.forward())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        return None, *ctx.builder.backward(grads)


# The two indices that each program of a layer gets. Successive programs read the same part of the
# larger table. New factors come after the old ones and begin in a new tile.


def _weight_tiles(
    tiling: Tiling, outputs: int, inputs: int, old: int, new: int
) -> Iterator[tuple[int, int]]:
    for i in range(0, inputs, tiling.inputs):
        for o in range(0, outputs, tiling.outputs):
            yield o, i


def _row_tiles(
    tiling: Tiling, outputs: int, inputs: int, old: int, new: int
) -> Iterator[tuple[int, int]]:
    for r in [*range(0, old, tiling.rank), *range(old, old + new, tiling.rank)]:
        yield r, 0


def _factor_tiles(
    tiling: Tiling, outputs: int, inputs: int, old: int, new: int
) -> Iterator[tuple[int, int]]:
    for r, _ in _row_tiles(tiling, outputs, inputs, old, new):
        for part in range(triton.cdiv(outputs, tiling.outputs)):
            yield r, part


def _new_tiles(
    tiling: Tiling, outputs: int, inputs: int, old: int, new: int
) -> Iterator[tuple[int, int]]:
    for r in range(0, new, tiling.rank):
        for i in range(0, inputs, tiling.inputs):
            yield r, i


def _sum_tiles(
    tiling: Tiling, outputs: int, inputs: int, old: int, new: int
) -> Iterator[tuple[int, int]]:
    for r in range(0, old + new, _SUM):
        yield r, 0

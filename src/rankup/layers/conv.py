"""Convolutions whose weights are a sum of factors."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankup.errors import RankupError
from rankup.layers.applied import AppliedLayer
from rankup.layers.dispatch import samples_to_plan
from rankup.layers.precomputed import BUILT
from rankup.layers.spec import ConvGeometry, FactoredSpec
from rankup.layers.tables import Block
from rankup.layers.task_context import LEARNING
from rankup.layers.tensors import over_space, working_dtype

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

_FUNCTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


class FactoredConv(AppliedLayer):
    """A convolution as a sum of factors: a convolution to R channels (V), a scale for each (the
    selector), and a pointwise convolution (U)."""

    torch_layer: ClassVar[type[Any]]
    space: ClassVar[str]  # names of an input's dimensions after the channels, for errors

    def __init__(
        self, spec: FactoredSpec, seed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(spec, seed, dtype, device)
        if spec.conv is None:
            raise RankupError(f"layer {spec.name!r} has no convolution geometry")
        self.conv = spec.conv
        # As in torch's own, for a module's forward to read; setting them changes nothing.
        self.kernel_size, self.stride = spec.conv.kernel_size, spec.conv.stride
        self.padding, self.dilation = spec.conv.padding, spec.conv.dilation
        self.padding_mode, self.groups = spec.conv.padding_mode, 1
        self.transposed, self.output_padding = False, (0,) * spec.conv.dims
        self._single = set(self.conv.kernel_size) == {1} and not any(border(self.conv))

    @property
    def in_channels(self) -> int:
        return self.conv.channels

    @property
    def out_channels(self) -> int:
        return self.spec.outputs

    def merged(self, task: int) -> nn.Module:
        conv: nn.Module = self.torch_layer(
            self.in_channels,
            self.out_channels,
            self.conv.kernel_size,
            self.conv.stride,
            self.conv.padding,
            self.conv.dilation,
            bias=self.spec.bias,
            padding_mode=self.conv.padding_mode,
            device="meta",
        )
        conv.weight = nn.Parameter(self._kernel(self.matrix(task)))
        if self.spec.bias:
            conv.bias = nn.Parameter(self._bias(task).to(self.computes_in, copy=True))
        return conv

    def _as_torchs(self, matrix: Tensor) -> Tensor:
        return self._kernel(matrix)

    def _check(self, x: Tensor) -> None:
        if x.dim() != self.conv.dims + 2 or x.shape[1] != self.in_channels:
            self._refuse_shape(x, f"[batch, {self.in_channels} channels, {self.space}]")
        self._check_dtype(x)

    def _positions(self, x: Tensor) -> int:
        positions = samples_to_plan(x)
        for size, stride in zip(x.shape[2:], self.conv.stride, strict=True):
            positions *= -(-size // stride)
        return positions

    def _takes_dense(self, x: Tensor, rank: int, learned: bool) -> bool:
        # On a GPU one convolution is faster than two, though it multiplies more: a step of ResNet18
        # takes 0.8 to 0.9 of the time (see docs/performance.md).
        return x.is_cuda or super()._takes_dense(x, rank, learned)

    def _learning(self, x: Tensor) -> Tensor:
        built = (BUILT.value or {}).get(self.spec.name)
        if built is None:
            return super()._learning(x)
        torch.cuda.current_stream().wait_event(built.ready)
        y = convolve(x, built.weight, self.conv)
        return y + self._per_channel(self._bias(LEARNING)).to(y.dtype) if self.spec.bias else y

    def build(self, dtype: torch.dtype) -> Tensor:
        """The kernel of the open task, in the memory format that is fastest on a GPU."""
        kernel = self._kernel(self._dense(self._blocks(LEARNING)))
        images = torch.channels_last if self.conv.dims == 2 else torch.preserve_format
        return kernel.to(dtype, memory_format=images)

    @property
    def is_built_with_others(self) -> bool:
        """Whether `kernels.build` can build this layer's kernel together with others."""
        return (
            self.conv.dims == 2
            and self.dtype == torch.float32
            and self.has_one_dtype
            and self.base_weight is None
            and self.spec.rank.added(self.place) > 0
        )

    def _map(self, x: Tensor, matrix: Tensor) -> Tensor:
        kernel = self._kernel(matrix)
        # Autocast leaves double precision alone.
        if torch.is_autocast_enabled(x.device.type) and self.computes_in != torch.float64:
            # One copy that changes dtype and memory format; torch would make two.
            images = self.conv.dims == 2
            last = images and x.is_contiguous(memory_format=torch.channels_last)
            kernel = kernel.to(
                torch.get_autocast_dtype(x.device.type),
                memory_format=torch.channels_last if last else torch.preserve_format,
            )
        return convolve(x, kernel.to(working_dtype(x)), self.conv)

    def _factored(self, x: Tensor, blocks: list[Block]) -> Tensor:
        # Old and new factors together: a CPU takes hardly less time for a convolution to one
        # channel than to sixteen, so computing gradients of frozen factors in vain costs less.
        if len(blocks) > 1:
            U, V, selector = map(torch.cat, zip(*blocks, strict=True))
            blocks = [(U, V, selector)]
        return super()._factored(x, blocks)

    def _kernel(self, matrix: Tensor) -> Tensor:
        return matrix.view(-1, self.in_channels, *self.conv.kernel_size)

    def _up(self, hidden: Tensor, U: Tensor) -> Tensor:
        kernel = over_space(U.t(), self.conv.dims).to(hidden.dtype)
        return _FUNCTIONS[self.conv.dims](hidden, kernel)

    @property
    def _pointwise(self) -> bool:
        return self._single

    def _map_each(self, x: Tensor, matrices: Tensor, start: Tensor | None) -> Tensor:
        flat = x.flatten(2)
        if start is None:
            y = torch.bmm(matrices, flat)
        else:
            y = torch.baddbmm(start.flatten(2), matrices, flat)
        return y.view(*y.shape[:2], *x.shape[2:])

    def _map_own(self, x: Tensor, weights: Tensor, biases: Tensor | None) -> Tensor:
        if self._pointwise:
            start = None if biases is None else self._per_sample(biases, x)
            strided = (slice(None, None, stride) for stride in self.conv.stride)
            return self._map_each(x[:, :, *strided], weights, start)
        # One image of all samples' channels, a group for each sample.
        together = x.reshape(1, -1, *x.shape[2:])
        flat = None if biases is None else biases.view(-1)
        y = convolve(together, self._kernel(weights), self.conv, flat, groups=len(x))
        return y.view(len(x), -1, *y.shape[2:])

    def _per_channel(self, row: Tensor) -> Tensor:
        return over_space(row, self.conv.dims)

    def _per_sample(self, rows: Tensor, x: Tensor) -> Tensor:
        return over_space(rows, self.conv.dims)


class FactoredConv1d(FactoredConv):
    torch_layer, space = nn.Conv1d, "length"


class FactoredConv2d(FactoredConv):
    torch_layer, space = nn.Conv2d, "height, width"


class FactoredConv3d(FactoredConv):
    torch_layer, space = nn.Conv3d, "depth, height, width"


def factored_conv(conv: ConvGeometry) -> type[FactoredConv]:
    return (FactoredConv1d, FactoredConv2d, FactoredConv3d)[conv.dims - 1]


def convolve(
    x: Tensor, kernel: Tensor, conv: ConvGeometry, bias: Tensor | None = None, groups: int = 1
) -> Tensor:
    padding: tuple[int, ...] | str | int = conv.padding
    if conv.padding_mode != "zeros":
        x, padding = F.pad(x, border(conv), mode=conv.padding_mode), 0
    function = _FUNCTIONS[conv.dims]
    return function(x, kernel, bias, conv.stride, padding, conv.dilation, groups)


def border(conv: ConvGeometry) -> list[int]:
    """The padding as `F.pad` takes it: the last dimension's left and right side first."""
    border: list[int] = []
    for axis in reversed(range(conv.dims)):
        if isinstance(conv.padding, str):
            total = conv.dilation[axis] * (conv.kernel_size[axis] - 1)
            total = total if conv.padding == "same" else 0
            border += [total // 2, total - total // 2]
        else:
            border += [conv.padding[axis]] * 2
    return border

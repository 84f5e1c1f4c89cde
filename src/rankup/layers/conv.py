"""Convolutions whose weights are a sum of factors."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankup.errors import RankupError
from rankup.layers.factored import FactoredLayer
from rankup.layers.given import BUILT
from rankup.specs import ConvGeometry, FactoredSpec


class FactoredConv2d(FactoredLayer):
    """`nn.Conv2d` as a sum of factors: a convolution to R channels (V), a scale for each (the
    selector), a 1×1 convolution (U)."""

    def __init__(
        self, spec: FactoredSpec, seed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(spec, seed, dtype, device)
        if spec.conv is None:
            raise RankupError(f"layer {spec.name!r} has no geometry of a convolution")
        self.conv = spec.conv
        self._border = border(spec.conv)

    @property
    def in_channels(self) -> int:
        return self.conv.channels

    @property
    def out_channels(self) -> int:
        return self.spec.outputs

    def plain(self, task: int) -> nn.Module:
        conv = nn.Conv2d(
            self.in_channels,
            self.out_channels,
            self.conv.kernel_size,
            self.conv.stride,
            self.conv.padding,
            self.conv.dilation,
            bias=self.spec.bias,
            padding_mode=self.conv.padding_mode,  # type: ignore[arg-type]
            device="meta",
        )
        conv.weight = nn.Parameter(self._kernel(self.weight(task)))
        if self.spec.bias:
            conv.bias = nn.Parameter(self._bias(task).clone())
        return conv

    def _check(self, x: Tensor) -> None:
        if x.dim() != 4 or x.shape[1] != self.in_channels:
            self._refuse_shape(x, f"[batch, {self.in_channels} channels, height, width]")
        self._check_dtype(x)

    def _positions(self, x: Tensor) -> int:
        height, width = self.conv.stride
        return len(x) * -(-x.shape[2] // height) * -(-x.shape[3] // width)

    def _takes_dense(self, x: Tensor, rank: int) -> bool:
        # On a GPU one convolution is faster than two of fewer multiplications (measured: a step of
        # ResNet18 takes 0.8 to 0.9 of the time, see docs/performance.md).
        return x.is_cuda or super()._takes_dense(x, rank)

    def _learning(self, x: Tensor) -> Tensor:
        built = (BUILT.get() or {}).get(self.spec.name)
        if built is None:
            return super()._learning(x)
        torch.cuda.current_stream().wait_event(built.ready)
        y = self._convolve(x, built.weight)
        return y + self._per_channel(self.new_bias) if self.spec.bias else y

    def build(self, dtype: torch.dtype, memory_format: torch.memory_format) -> Tensor:
        """The kernel of the task being learned."""
        kernel = self._kernel(self._dense(self._blocks(self.count)))
        return kernel.to(dtype, memory_format=memory_format)

    @property
    def is_built_with_others(self) -> bool:
        """Whether a kernel of ours can build the convolution's for the task being learned."""
        return (
            self.dtype == torch.float32
            and self.base_weight is None
            and self.spec.rank.added(self.count) > 0
        )

    def _map(self, x: Tensor, matrix: Tensor) -> Tensor:
        kernel = self._kernel(matrix)
        if torch.is_autocast_enabled(x.device.type):
            # Cast and brought into the input's layout at once; torch would do it one by one.
            last = x.is_contiguous(memory_format=torch.channels_last)
            kernel = kernel.to(
                torch.get_autocast_dtype(x.device.type),
                memory_format=torch.channels_last if last else torch.preserve_format,
            )
        return self._convolve(x, kernel)

    def _convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        x, padding = self._padded(x)
        return F.conv2d(x, kernel, None, self.conv.stride, padding, self.conv.dilation)

    def _padded(self, x: Tensor) -> tuple[Tensor, tuple[int, int] | str]:
        """The input, and the padding that is left for the convolution to do."""
        if self.conv.padding_mode == "zeros":
            return x, self.conv.padding
        return F.pad(x, self._border, mode=self.conv.padding_mode), (0, 0)

    def _kernel(self, matrix: Tensor) -> Tensor:
        return matrix.view(-1, self.in_channels, *self.conv.kernel_size)

    def _up(self, hidden: Tensor, U: Tensor) -> Tensor:
        return F.conv2d(hidden, U.t()[:, :, None, None])

    @property
    def _pointwise(self) -> bool:
        return self.conv.kernel_size == (1, 1) and not any(self._border)

    def _map_each(self, x: Tensor, matrices: Tensor, start: Tensor | None) -> Tensor:
        flat = x.flatten(2)
        if start is None:
            y = torch.bmm(matrices, flat)
        else:
            y = torch.baddbmm(start.flatten(2), matrices, flat)
        return y.view(*y.shape[:2], *x.shape[2:])

    def _map_own(self, x: Tensor, weights: Tensor, biases: Tensor | None) -> Tensor:
        if self._pointwise:
            height, width = self.conv.stride
            start = None if biases is None else self._per_sample(biases, x)
            return self._map_each(x[:, :, ::height, ::width], weights, start)
        # One image of all samples' channels, a group for each sample.
        padded, padding = self._padded(x)
        y = F.conv2d(
            padded.reshape(1, -1, *padded.shape[2:]),
            self._kernel(weights),
            None if biases is None else biases.view(-1),
            self.conv.stride,
            padding,
            self.conv.dilation,
            groups=len(x),
        )
        return y.view(len(x), -1, *y.shape[2:])

    def _per_channel(self, row: Tensor) -> Tensor:
        return row[:, None, None]

    def _per_sample(self, rows: Tensor, x: Tensor) -> Tensor:
        return rows[:, :, None, None]


def border(conv: ConvGeometry) -> list[int]:
    """The padding as `F.pad` takes it: the last dimension's left and right side first."""
    border: list[int] = []
    for axis in (1, 0):
        if isinstance(conv.padding, str):
            total = conv.dilation[axis] * (conv.kernel_size[axis] - 1)
            total = total if conv.padding == "same" else 0
            border += [total // 2, total - total // 2]
        else:
            border += [conv.padding[axis]] * 2
    return border

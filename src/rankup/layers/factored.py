"""Linear and convolutional layers whose weights are a sum of factors."""

import math
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankup import seeds
from rankup.errors import RankupError
from rankup.layers.base import Start, TaskLayer, Tensors, over_last
from rankup.layers.node import FactoredMap
from rankup.specs import ConvGeometry, FactoredSpec


def dense_is_cheaper(positions: int, rank: int, inputs: int, outputs: int) -> bool:
    """Whether building W and applying it takes fewer multiplications than applying the factors.

    A rule of shapes and the task's own rank alone: later tasks cannot change which form runs, and
    with it the bits.
    """
    dense = rank * inputs * outputs + positions * inputs * outputs
    factored = positions * rank * (inputs + outputs)
    return dense < factored


_projected: ContextVar[tuple[str, Tensor] | None] = ContextVar("rankup_projected", default=None)


@contextmanager
def projected(layer: "FactoredLinear", rows: Tensor) -> Iterator[None]:
    """Inside, the layer's frozen factors have seen its inputs already: `rows` are what
    `layer.project` gave for them."""
    token = _projected.set((layer.spec.name, rows))
    try:
        yield
    finally:
        _projected.reset(token)


Block = tuple[Tensor, Tensor, Tensor]  # U [R, out], V [R, in], selector [R]


class FactoredLayer(TaskLayer):
    """`W_t = W₀ + Σ_i s_{i,t} · u_i v_iᵀ` over the factors up to task t, W₀ where one was kept.

    Tables: `U [R, out]` and `V [R, in]`, seeded factors first, so that a task's factors are a
    prefix; `S [T, R]`, zero-padded; `B [T, out]`.
    """

    spec: FactoredSpec
    U: Tensor
    V: Tensor
    S: Tensor
    B: Tensor
    base_weight: Tensor | None
    base_bias: Tensor | None
    new_U: Tensor
    new_V: Tensor
    new_selector: Tensor
    new_bias: Tensor

    def __init__(
        self, spec: FactoredSpec, seed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(spec, seed, dtype, device)
        for part, length in (("U", spec.outputs), ("V", spec.inputs)):
            seeded = seeds.signs(seed, spec.name, part, spec.rank.seeded, length, dtype)
            self.register_buffer(part, seeded.to(device))
        self.register_buffer("S", torch.empty(0, spec.rank.seeded, **self._factory))
        self.register_buffer("B", torch.empty(0, spec.outputs, **self._factory))
        self.register_buffer("base_weight", None)
        self.register_buffer("base_bias", None)

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        task = self._task(x)
        if isinstance(task, Tensor):
            hidden = self._map(x, self.V) * self._per_sample(self.S[task], x)
            y = self._add_base(x, self._up(hidden, self.U))
            return y + self._per_sample(self.B[task], x) if self.spec.bias else y
        return self._learning(x) if task == self.count else self._plain(x, task)

    def _learning(self, x: Tensor) -> Tensor:
        return self._plain(x, self.count)

    def _plain(self, x: Tensor, task: int) -> Tensor:
        y = self._combine(x, self._blocks(task))
        return y + self._per_channel(self._bias(task)) if self.spec.bias else y

    def weight(self, task: int) -> Tensor:
        """The task's W as a matrix, `[out, in]`."""
        return self._dense(self._blocks(task))

    def start(self, classes: int, start: Start) -> Tensors:
        rank, outputs, inputs = self.spec.rank, self.spec.outputs, self.spec.inputs
        added = rank.added(self.count)
        values = {"selector": self._start_selector(start)}
        if added:
            values["U"] = self._orthogonal(added, outputs, "U")
            values["V"] = self._orthogonal(added, inputs, "V")
            if self.base_weight is not None:
                # A pretrained layer starts as it was; V and the selector keep the gradient alive.
                values["U"].zero_()
        if self.spec.bias:
            zero = torch.zeros(outputs, **self._factory)
            values["bias"] = zero if self.base_bias is None else self.base_bias.clone()
        return values

    def extended(self, added: Tensors) -> Tensors:
        tables = {}
        if "U" in added:
            tables = {part: torch.cat([getattr(self, part), added[part]]) for part in ("U", "V")}
        selector = added["selector"]
        padded = F.pad(self.S, (0, len(selector) - self.S.shape[1]))
        tables["S"] = torch.cat([padded, selector[None]])
        if self.spec.bias:
            tables["B"] = torch.cat([self.B, added["bias"][None]])
        return tables

    def added(self, task: int) -> Tensors:
        used, own = self.spec.rank.used(task), self.spec.rank.added(task)
        added = {"selector": self.S[task, :used]}
        if own:
            added |= {"U": self.U[used - own : used], "V": self.V[used - own : used]}
        return added | {"bias": self.B[task]} if self.spec.bias else added

    def _start_selector(self, start: Start) -> Tensor:
        rank, task = self.spec.rank, self.count
        selector = torch.ones(rank.used(task), **self._factory)
        old = rank.used(task) - rank.added(task)
        if start.selectors == "previous" and task > 0:
            selector[:old] = self.S[task - 1, :old]
            return selector
        if start.selectors != "previous":
            selector[:old] = start.selectors
        # Over seeded factors a selector cannot start at zero, or the layer would compute nothing
        # and never learn; this deviation gives W the usual scale for its inputs. Where a kept W₀
        # does the computing, zero is the start that leaves it as it was.
        if self.base_weight is None:
            gain = 1 if self.spec.before_batch_norm else 2
            deviation = math.sqrt(gain * self.spec.outputs / max(1, rank.seeded))
            drawn = torch.randn(rank.seeded, generator=self._draw("selector"))
            selector[: rank.seeded] = (deviation * drawn).to(**self._factory)
        else:
            selector[: rank.seeded] = 0
        return selector

    def _blocks(self, task: int) -> list[Block]:
        used = self.spec.rank.used(task)
        if task < self.count:
            return [(self.U[:used], self.V[:used], self.S[task, :used])]
        # Old and new apart: autograd then spends nothing on the frozen ones.
        old = used - self.spec.rank.added(task)
        blocks = [(self.U, self.V, self.new_selector[:old])] if old else []
        if used > old:
            blocks.append((self.new_U, self.new_V, self.new_selector[old:]))
        return blocks

    def _bias(self, task: int) -> Tensor:
        return self.B[task] if task < self.count else self.new_bias

    def _combine(self, x: Tensor, blocks: list[Block]) -> Tensor:
        rank = sum(len(selector) for _, _, selector in blocks)
        if dense_is_cheaper(self._positions(x), rank, self.spec.inputs, self.spec.outputs):
            return self._map(x, self._dense(blocks))
        return self._factored(x, blocks)

    def _factored(self, x: Tensor, blocks: list[Block]) -> Tensor:
        parts = [self._up(self._map(x, V) * self._per_channel(s), U) for U, V, s in blocks]
        return self._add_base(x, reduce(torch.add, parts))

    def _dense(self, blocks: list[Block]) -> Tensor:
        parts = [(U * s[:, None]).t() @ V for U, V, s in blocks]  # [out, in] each
        weight = reduce(torch.add, parts)
        return weight if self.base_weight is None else self.base_weight + weight

    def _add_base(self, x: Tensor, y: Tensor) -> Tensor:
        return y if self.base_weight is None else y + self._map(x, self.base_weight)

    @abstractmethod
    def _check(self, x: Tensor) -> None:
        """Refuse an input that does not fit."""

    @abstractmethod
    def _positions(self, x: Tensor) -> int:
        """How many times the layer applies its matrix to this input."""

    @abstractmethod
    def _map(self, x: Tensor, matrix: Tensor) -> Tensor:
        """The layer with the matrix `[n, in]` for its weight: n output channels."""

    @abstractmethod
    def _up(self, hidden: Tensor, U: Tensor) -> Tensor:
        """From R channels to the layer's outputs."""

    @abstractmethod
    def _per_channel(self, row: Tensor) -> Tensor:
        """`row [n]`, shaped to multiply what has n channels."""

    @abstractmethod
    def _per_sample(self, rows: Tensor, x: Tensor) -> Tensor:
        """`rows [B, n]`, shaped to multiply what came of `x` and has n channels."""


class FactoredLinear(FactoredLayer):
    """`nn.Linear` as a sum of factors, for inputs `[B, …, in]`."""

    @property
    def in_features(self) -> int:
        return self.spec.inputs

    @property
    def out_features(self) -> int:
        return self.spec.outputs

    def project(self, x: Tensor) -> Tensor:
        """What the frozen factors see of inputs `[N, in]`: constant while a task is learned."""
        return x @ self.V.t()

    def _learning(self, x: Tensor) -> Tensor:
        rank, given = self.spec.rank, _projected.get()
        seen = given[1] if given is not None and given[0] == self.spec.name else None
        if seen is None and not self._takes_node(x, rank.used(self.count)):
            return self._plain(x, self.count)
        new = rank.added(self.count) > 0
        y: Tensor = FactoredMap.apply(  # type: ignore[no-untyped-call]
            x.reshape(-1, self.in_features),
            self.new_selector,
            self.new_U if new else None,
            self.new_V if new else None,
            self.new_bias if self.spec.bias else None,
            self.U,
            self.V,
            seen,
        )
        return y.view(*x.shape[:-1], self.out_features)

    def _takes_node(self, x: Tensor, rank: int) -> bool:
        """Whether the fast form of learning fits: not for a kept weight or a rank so high that W
        is cheaper, and not under autocast or the transforms of torch.func, which do not know it."""
        return (
            self.base_weight is None
            and not torch.is_autocast_enabled(x.device.type)
            and not torch._C._are_functorch_transforms_active()
            and not dense_is_cheaper(self._positions(x), rank, self.in_features, self.out_features)
        )

    def plain(self, task: int) -> nn.Module:
        linear = nn.Linear(self.in_features, self.out_features, self.spec.bias, device="meta")
        linear.weight = nn.Parameter(self.weight(task))
        if self.spec.bias:
            linear.bias = nn.Parameter(self._bias(task).clone())
        return linear

    def _check(self, x: Tensor) -> None:
        if x.shape[-1] != self.in_features:
            self._refuse_shape(x, f"{self.in_features} features in the last dimension")

    def _positions(self, x: Tensor) -> int:
        return x.numel() // self.in_features

    def _map(self, x: Tensor, matrix: Tensor) -> Tensor:
        return F.linear(x, matrix)

    def _up(self, hidden: Tensor, U: Tensor) -> Tensor:
        return hidden @ U

    def _per_channel(self, row: Tensor) -> Tensor:
        return row

    def _per_sample(self, rows: Tensor, x: Tensor) -> Tensor:
        return over_last(rows, x)


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
        self._border = _border(spec.conv)

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

    def _positions(self, x: Tensor) -> int:
        height, width = self.conv.stride
        return len(x) * -(-x.shape[2] // height) * -(-x.shape[3] // width)

    def _map(self, x: Tensor, matrix: Tensor) -> Tensor:
        padding = self.conv.padding
        if self.conv.padding_mode != "zeros":
            x, padding = F.pad(x, self._border, mode=self.conv.padding_mode), (0, 0)
        kernel = self._kernel(matrix)
        return F.conv2d(x, kernel, None, self.conv.stride, padding, self.conv.dilation)

    def _kernel(self, matrix: Tensor) -> Tensor:
        return matrix.view(-1, self.in_channels, *self.conv.kernel_size)

    def _up(self, hidden: Tensor, U: Tensor) -> Tensor:
        return F.conv2d(hidden, U.t()[:, :, None, None])

    def _per_channel(self, row: Tensor) -> Tensor:
        return row[:, None, None]

    def _per_sample(self, rows: Tensor, x: Tensor) -> Tensor:
        return rows[:, :, None, None]


def _border(conv: ConvGeometry) -> list[int]:
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

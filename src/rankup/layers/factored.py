"""Linear and convolutional layers whose weights are a sum of factors."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce
from operator import itemgetter
from typing import Any, Literal, NamedTuple

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


MixedWay = Literal["hidden", "factors", "weights"]


class MixedShape(NamedTuple):
    """What the way of a mixed batch through a layer is chosen by."""

    samples: int
    places: int  # positions in a sample at which the layer applies its matrix
    tasks: int
    rank: int
    inputs: int
    outputs: int
    pointwise: bool  # as no kernel of several taps is


class _Reckoned(NamedTuple):
    """What a device does while it moves one number to or from its memory."""

    multiplications: float
    with_own_kernels: float  # multiplications of a convolution that has a kernel per sample


_RECKONED = {"cpu": _Reckoned(12, 12), "cuda": _Reckoned(40, 1)}


def mixed_way(shape: MixedShape, device: str) -> MixedWay:
    """What a row per sample scales: the hidden channels that V gives, U, or all factors, summed to
    a weight per sample. Whatever takes least, reckoned in numbers moved.

    A rule of shapes alone: the same batch shape takes the same way every time.
    """
    samples, places, tasks, rank, inputs, outputs, pointwise = shape
    at_once, with_own_kernels = _RECKONED.get(device, _RECKONED["cpu"])
    hidden = samples * places * rank
    with_factors = hidden * (inputs + outputs) / at_once
    by_hidden = with_factors + 4 * hidden
    by_factors = with_factors + 2 * hidden + 2 * samples * rank * outputs
    building = min(tasks, samples) * outputs * inputs * (2 + rank / at_once)
    with_weights = (
        samples * places * inputs * outputs / (at_once if pointwise else with_own_kernels)
    )
    by_weights = with_weights + 2 * samples * outputs * inputs + building
    if by_weights < min(by_hidden, by_factors):
        return "weights"
    return "hidden" if by_hidden <= by_factors else "factors"


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


_read_tables: Callable[[dict[str, Any]], tuple[Any, ...]] = itemgetter(
    "U", "V", "S", "B", "base_weight"
)

_built: ContextVar[dict[str, Tensor] | None] = ContextVar("rankup_built", default=None)


@contextmanager
def built(kernels: dict[str, Tensor]) -> Iterator[None]:
    """Inside, convolutions by these names have their kernels for the task being learned already:
    they are what `layer.build` gave."""
    token = _built.set(kernels)
    try:
        yield
    finally:
        _built.reset(token)


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
            return self._mixed(x, task)
        return self._learning(x) if task == self.count else self._plain(x, task)

    def _mixed(self, x: Tensor, tasks: Tensor) -> Tensor:
        tasks_known, rank = self.S.shape
        way = mixed_way(
            MixedShape(
                samples=len(x),
                places=self._positions(x) // max(1, len(x)),
                tasks=tasks_known,
                rank=rank,
                inputs=self.spec.inputs,
                outputs=self.spec.outputs,
                pointwise=self._pointwise,
            ),
            x.device.type,
        )
        if way == "weights":
            return self._mixed_by_weights(x, tasks)
        return (self._mixed_by_hidden if way == "hidden" else self._mixed_by_factors)(x, tasks)

    def _mixed_by_hidden(self, x: Tensor, tasks: Tensor) -> Tensor:
        hidden = self._map(x, self.V) * self._per_sample(self.S.index_select(0, tasks), x)
        y, start = self._up(hidden, self.U), self._mixed_start(x, tasks)
        return y if start is None else y + start

    def _mixed_by_factors(self, x: Tensor, tasks: Tensor) -> Tensor:
        scaled = self._scaled_U(self.S.index_select(0, tasks))
        return self._map_each(self._map(x, self.V), scaled, self._mixed_start(x, tasks))

    def _mixed_by_weights(self, x: Tensor, tasks: Tensor) -> Tensor:
        few = len(self.S) <= len(tasks)  # a task's weight is built once, not for every sample
        selectors = self.S if few else self.S.index_select(0, tasks)
        weights = self._scaled_U(selectors) @ self.V
        if self.base_weight is not None:
            weights = weights + self.base_weight
        own = weights.index_select(0, tasks) if few else weights
        return self._map_own(x, own, self.B.index_select(0, tasks) if self.spec.bias else None)

    def _scaled_U(self, selectors: Tensor) -> Tensor:
        return selectors[:, None] * self.U.t()  # [n, out, R]

    def _mixed_start(self, x: Tensor, tasks: Tensor) -> Tensor | None:
        """What the sum of the factors is added to: the biases and what a kept weight gives."""
        biases = self._per_sample(self.B.index_select(0, tasks), x) if self.spec.bias else None
        if self.base_weight is None:
            return biases
        base = self._map(x, self.base_weight)
        return base if biases is None else base + biases

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
            values["U"] = self._orthogonal(added, outputs, "U") * start.factors
            values["V"] = self._orthogonal(added, inputs, "V") * start.factors
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
        # Old and new apart: autograd then spends nothing on the frozen ones. Zeros at the end of
        # the old ones, which make the shapes of several tasks the same, do no harm.
        old = len(self.U)
        blocks = [(self.U, self.V, self.new_selector[:old])] if old else []
        if self.spec.rank.added(task):
            blocks.append((self.new_U, self.new_V, self.new_selector[old:]))
        return blocks

    def _bias(self, task: int) -> Tensor:
        return self.B[task] if task < self.count else self.new_bias

    def _combine(self, x: Tensor, blocks: list[Block]) -> Tensor:
        rank = sum(len(selector) for _, _, selector in blocks)
        if self._takes_dense(x, rank):
            return self._map(x, self._dense(blocks))
        return self._factored(x, blocks)

    def _takes_dense(self, x: Tensor, rank: int) -> bool:
        """Which form runs: a rule of shapes, the task's own rank and the device."""
        return dense_is_cheaper(self._positions(x), rank, self.spec.inputs, self.spec.outputs)

    def _factored(self, x: Tensor, blocks: list[Block]) -> Tensor:
        parts = [self._up(self._map(x, V) * self._per_channel(s), U) for U, V, s in blocks]
        return self._add_base(x, reduce(torch.add, parts))

    def _dense(self, blocks: list[Block]) -> Tensor:
        # In full precision: W is small, and casting its many factors would take longer.
        with torch.autocast(self.U.device.type, enabled=False):
            weight = self.base_weight
            for U, V, selector in blocks:
                scaled = (U * selector[:, None]).t()
                weight = scaled @ V if weight is None else torch.addmm(weight, scaled, V)
        assert weight is not None
        return weight  # [out, in]

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

    @property
    @abstractmethod
    def _pointwise(self) -> bool:
        """Whether an output sees one position of the input alone."""

    @abstractmethod
    def _map_each(self, x: Tensor, matrices: Tensor, start: Tensor | None) -> Tensor:
        """`start` plus a matrix per sample, `[B, out, n]`, at every position of x's n channels."""

    @abstractmethod
    def _map_own(self, x: Tensor, weights: Tensor, biases: Tensor | None) -> Tensor:
        """The layer with weights per sample, `[B, out, in]`, and biases `[B, out]`."""

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
        if not self._takes_node(x, rank.used(self.count), seen):
            return self._plain(x, self.count) if seen is None else self._projected_plain(x, seen)
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

    def _takes_node(self, x: Tensor, rank: int, seen: Tensor | None) -> bool:
        """Whether the fast form of learning fits: not for a kept weight or a rank so high that W
        is cheaper, and not under autocast or the transforms of torch.func, which do not know it."""
        if torch.is_autocast_enabled(x.device.type) or torch._C._are_functorch_transforms_active():
            return False
        return seen is not None or not (self.base_weight is not None or self._takes_dense(x, rank))

    def _projected_plain(self, x: Tensor, seen: Tensor) -> Tensor:
        """What the node computes, in operations that torch knows."""
        old, added = len(self.U), self.spec.rank.added(self.count)
        y = (seen * self.new_selector[:old]) @ self.U
        if added:
            hidden = x.reshape(-1, self.in_features) @ self.new_V.t()
            y = y + (hidden * self.new_selector[old:]) @ self.new_U
        y = y + self.new_bias if self.spec.bias else y
        return y.view(*x.shape[:-1], self.out_features)

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

    def _mixed(self, x: Tensor, tasks: Tensor) -> Tensor:
        # A matrix for each sample's one position is never less work. In place, because a product
        # that is added to something otherwise begins with a copy of that.
        if x.dim() != 2 or _transformed(x):
            return super()._mixed(x, tasks)
        U, V, S, B, base = self._tables()
        hidden = F.linear(x, V).mul_(S.index_select(0, tasks))
        y = B.index_select(0, tasks).addmm_(hidden, U) if self.spec.bias else hidden @ U
        return y if base is None else y.addmm_(x, base.t())

    def _tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        # One by one, a module's attributes take longer to look up than what is done with them.
        U, V, S, B, base = _read_tables(self._buffers)
        return U, V, S, B, base

    @property
    def _pointwise(self) -> bool:
        return True

    def _map_each(self, x: Tensor, matrices: Tensor, start: Tensor | None) -> Tensor:
        flat, mirrored = _sequence(x), matrices.transpose(1, 2)
        if start is None:
            y = torch.bmm(flat, mirrored)
        else:
            y = torch.baddbmm(_sequence(start), flat, mirrored)
        return y.view(*x.shape[:-1], y.shape[-1])

    def _map_own(self, x: Tensor, weights: Tensor, biases: Tensor | None) -> Tensor:
        return self._map_each(x, weights, None if biases is None else over_last(biases, x))

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

    def _takes_dense(self, x: Tensor, rank: int) -> bool:
        # On a GPU one convolution is faster than two of fewer multiplications (measured: a step of
        # ResNet18 takes 0.8 to 0.9 of the time, see docs/performance.md).
        return x.is_cuda or super()._takes_dense(x, rank)

    def _learning(self, x: Tensor) -> Tensor:
        kernel = (_built.get() or {}).get(self.spec.name)
        if kernel is None:
            return super()._learning(x)
        y = self._convolve(x, kernel)
        return y + self._per_channel(self.new_bias) if self.spec.bias else y

    def build(self, dtype: torch.dtype, memory_format: torch.memory_format) -> Tensor:
        """The kernel of the task being learned."""
        kernel = self._kernel(self._dense(self._blocks(self.count)))
        return kernel.to(dtype, memory_format=memory_format)

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


def _sequence(x: Tensor) -> Tensor:
    """`[B, …, n]` with all positions of a sample in one dimension."""
    return x.reshape(len(x), math.prod(x.shape[1:-1]), x.shape[-1])


def _transformed(x: Tensor) -> bool:
    """Whether autocast or a transform of torch.func is on, which do not know operations in place
    on what they have not seen."""
    return torch.is_autocast_enabled(x.device.type) or torch._C._are_functorch_transforms_active()


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

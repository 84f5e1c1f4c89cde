"""The base class of all layers of a grown network.

A layer holds tables of what its committed tasks added, all of them buffers, and for the task being
learned parameters of its own, named `new_…`. Which task it runs for is no state on the module: see
`task_context.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from rankup import seeds
from rankup.errors import RankupError, TaskStateError
from rankup.layers.spec import HeadSpec, LayerSpec, kept_dtype, learned_dtype
from rankup.layers.task_context import LEARNING, active_task
from rankup.rank import Place

Tensors = dict[str, Tensor]
# The indices of the tasks that a task selects from, in its own order; None for all before it.
Selection = tuple[int, ...] | None

_ALIGNED = 64  # bytes: where torch lets a tensor begin


@dataclass(frozen=True)
class Start:
    """Where a new task's selectors over old factors and its norms' weights start, how long its own
    factors' vectors are at first, and from which tasks it selects. Its draws are seeded by `key`,
    its name; without one, by its number."""

    selectors: float | Literal["previous", "halfway"] = 0.0
    norms: Literal["fresh", "previous"] = "fresh"
    factors: float = 1.0
    key: str | None = None
    selection: Selection = None
    place: Place | None = None

    def previous(self, count: int) -> int | None:
        """The index of the last of the tasks that the next one, number `count`, selects from."""
        if self.selection is None:
            return count - 1 if count else None
        return self.selection[-1] if self.selection else None


def refuse_other_dtype(change: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """Raise if `change`, applied to every tensor as by `Module.to`, would alter the dtype."""
    other = change(torch.empty(0, dtype=dtype)).dtype
    if other != dtype:
        raise RankupError(
            f"a grown network stays in {dtype}, as {other} would change the bits of every task it "
            f"knows: use merged(task).to({other}), or grow a module in {other}"
        )


class RowsError(RankupError):
    """A layer got another number of rows than a mixed batch has samples. Its arguments are what it
    says and that number: torch.compile cannot trace an `__init__` of its own."""

    @property
    def rows(self) -> int:
        return int(self.args[1])

    def __str__(self) -> str:
        return str(self.args[0])


class Placeholder:
    """Weight that exposes only shape, dtype and device, as in `x.to(self.conv.weight.dtype)`."""

    def __init__(
        self, shape: torch.Size, refusal: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape, self.dtype, self.device, self.ndim = shape, dtype, device, len(shape)
        self.refusal = refusal

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def __getattr__(self, name: str) -> Any:
        raise TaskStateError(self.refusal)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        placeholder = next(arg for arg in (*args, *(kwargs or {}).values()) if type(arg) is cls)
        if func in (Tensor.to, Tensor.type_as):
            return args[0].to(placeholder.device, placeholder.dtype)
        raise TaskStateError(placeholder.refusal)


class TaskLayer(nn.Module, ABC):
    """Base of all layers: the stages of a task, from `start` through `open` and `learned` to
    `close` and `install`."""

    spec: LayerSpec

    def __init__(
        self, spec: LayerSpec, seed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.spec = spec
        self.seed = seed
        given = name_of(dtype)
        self.dtype: torch.dtype = getattr(torch, learned_dtype(spec, given))
        self.computes_in = dtype if spec.dtypes is None else getattr(torch, spec.dtypes.computes)
        self.base_dtype: torch.dtype = getattr(torch, kept_dtype(spec, "weight", given))
        self.has_one_dtype = {self.dtype, self.base_dtype} == {self.computes_in}
        self.count = 0  # committed tasks
        self.attributes: list[str] = []  # names of those copied from the layer it replaces
        self._factory: dict[str, Any] = {"dtype": self.dtype, "device": device}

    @abstractmethod
    def start(self, classes: int, start: Start) -> Tensors:
        """The values that the next task starts with."""

    @abstractmethod
    def extended(self, *added: Tensors, selections: Sequence[Selection] = (None,)) -> Tensors:
        """The tables with one more task in them, or with several, each of which selects from some
        of those before it; nothing is changed yet."""

    @abstractmethod
    def added(self, task: int) -> Tensors:
        """What a committed task added."""

    def merged(self, task: int) -> nn.Module:
        """Torch's own layer that computes what this one does for a committed task. Layers that only
        rivals have are not merged."""
        raise NotImplementedError

    def without(self, task: int) -> Tensors:
        """The tables without a committed task; nothing is changed yet. Layers that only rivals have
        never lose one."""
        raise NotImplementedError

    def drop(self, task: int, tables: Tensors) -> None:
        """Remove a committed task, whose tables without it `without` gave."""
        self._buffers = {**self._buffers, **tables}
        self.count -= 1

    def open(self, values: Tensors, start: Start | None = None) -> None:
        # All at once, here as in `close`: another thread may be copying the network.
        new = {f"new_{key}": nn.Parameter(value) for key, value in values.items()}
        self._parameters = {**self._parameters, **new}

    def learned(self) -> Tensors:
        return {key.removeprefix("new_"): p.detach() for key, p in self.named_parameters()}

    def close(self) -> None:
        self._parameters = {}

    def install(self, tables: Tensors, selections: Sequence[Selection] = (None,)) -> None:
        """Make tables the layer's own: those with one more task, or with several, each of which
        selects from some of those before it."""
        # All tables at once: a thread that reads `_buffers` once has either the old or the new
        # ones, never some of each.
        self._buffers = {**self._buffers, **tables}
        # Last, so that a thread which runs one task finds it in the tables.
        self.count += len(selections)

    def take_attributes(self, original: nn.Module) -> None:
        """Copy the attributes, other than tensors, of the layer that it replaces: the module's
        forward may read them."""
        taken = {*vars(self), *dir(type(self)), *self._buffers}
        torchs = {*type(original).__constants__, "training", "transposed"}  # type: ignore[attr-defined]
        for key, value in vars(original).items():
            if key not in taken:
                setattr(self, key, value)
                self.attributes.append(key)
            elif not key.startswith("_") and key not in torchs:
                raise RankupError(
                    f"layer {self.spec.name!r} has an attribute {key!r}, a name that a network's "
                    "layers use themselves: rename it"
                )

    def hand_attributes(self, plain: nn.Module) -> None:
        """Copy those attributes to the plain layer that replaces this one."""
        for key in self.attributes:
            setattr(plain, key, getattr(self, key))

    def base(self) -> Tensors:
        """What was kept of the module this layer replaced."""
        kept = {key: self._buffers.get(f"base_{key}") for key in ("weight", "bias")}
        return {key: tensor for key, tensor in kept.items() if tensor is not None}

    def load_base(self, base: Tensors, copy: bool = True) -> None:
        for key, tensor in base.items():
            dtype = self.base_dtype if key == "weight" else self.dtype
            kept = row_by_row(tensor.detach(), self._factory["device"], dtype, copy)
            self.register_buffer(f"base_{key}", kept)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for dtype in {self.dtype, self.computes_in, self.base_dtype}:
            refuse_other_dtype(fn, dtype)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Some changes move nothing, so this one is tried on a tensor on the layer's device.
        self._factory["device"] = fn(torch.empty(0, device=self._factory["device"])).device
        return self

    def _knows(self, task: int) -> bool:
        """Whether a task is committed. How many there are is not looked at for the one that is
        being learned, or compiled code would depend on it."""
        return task != LEARNING and 0 <= task < self.count

    def _learns(self, task: int) -> bool:
        # Not the dict's truth, which not every torch.compile can trace.
        return len(self._parameters) > 0 and (task == LEARNING or task == self.count)

    def _task_read(self, what: str) -> int:
        """The one active task, of which a module's forward reads something directly."""
        task = active_task()
        if not isinstance(task, int):
            raise TaskStateError(self._unreadable(what))
        return task

    def _read_of_task(
        self, what: str, shape: Sequence[int], read: Callable[[int], Tensor]
    ) -> Tensor:
        """What the module's forward reads directly, for the active task; of a mixed batch, which
        has no one task, a placeholder."""
        if isinstance(active_task(), Tensor):
            seen = self.computes_in, self._factory["device"]
            return Placeholder(torch.Size(shape), self._unreadable(what), *seen)  # type: ignore[return-value]
        return read(self._task_read(what))

    def _unreadable(self, what: str) -> str:
        return (
            f"layer {self.spec.name!r} has a {what} for each task, which can be read only while "
            "the network runs for a single task"
        )

    def _task(self, x: Tensor) -> int | Tensor:
        task = active_task()
        if task is None:
            raise TaskStateError(
                f"layer {self.spec.name!r} was called directly: call the network, which sets the "
                "task, or set it with rankup.layers.active(index); if activation checkpointing "
                "runs it again, pass use_reentrant=False and do not nest checkpoints"
            )
        # Not len, which torch.export would take for a constant.
        if isinstance(task, Tensor) and x.shape[0] != task.shape[0]:
            raise RowsError(
                f"layer {self.spec.name!r} got {len(x)} rows for a mixed batch of {len(task)} "
                "tasks: pass one task per sample, or run each task by itself",
                len(x),
            )
        return task

    def _check_dtype(self, x: Tensor) -> None:
        if x.dtype != self.computes_in and not torch.is_autocast_enabled(x.device.type):
            raise RankupError(
                f"layer {self.spec.name!r} computes in {self.computes_in}, got {x.dtype}"
            )

    def _widened_input(self, x: Tensor) -> Tensor:
        """Activations in the dtype that tasks learn in, for layers that hardly compute: their
        answers are brought back. Autocast does the same by itself."""
        if self.has_one_dtype or torch.is_autocast_enabled(x.device.type):
            return x
        return x.to(self.dtype)

    def _refuse_shape(self, x: Tensor, expected: str) -> None:
        raise RankupError(
            f"layer {self.spec.name!r} expects {expected}, got an input of shape {list(x.shape)}"
        )

    def _draw(self, purpose: str, key: str | None = None) -> torch.Generator:
        by = self.count if key is None else key
        return seeds.generator(self.seed, purpose, self.spec.name, by)

    def _head_start(self, classes: int, spec: HeadSpec, key: str | None = None) -> Tensors:
        values = {"weight": self._orthogonal(classes, spec.inputs, "head", key)}
        if spec.bias:
            values["bias"] = torch.zeros(classes, **self._factory)
        return values

    def _orthogonal(self, rows: int, length: int, purpose: str, key: str | None = None) -> Tensor:
        # On the CPU and at least in float32, whatever the network's device and dtype: the same
        # start everywhere, and there is no QR in half precision.
        drawn = torch.empty(rows, length, dtype=at_least_float32(self.dtype), device="cpu")
        nn.init.orthogonal_(drawn, generator=self._draw(purpose, key))
        return drawn.to(**self._factory)


def row_by_row(
    tensor: Tensor, device: torch.device, dtype: torch.dtype, copy: bool = True
) -> Tensor:
    """A contiguous copy, as loading from a file gives it: torch may compute different bits from a
    tensor with other strides, such as a transposed one, or at an address that is not aligned. With
    `copy=False` the tensor itself, if it is like that already."""
    alike = tensor.is_contiguous() and (tensor.device, tensor.dtype) == (device, dtype)
    if not copy and alike and tensor.data_ptr() % _ALIGNED == 0:
        return tensor
    return tensor.to(device, dtype, copy=True, memory_format=torch.contiguous_format)


def cut_out(table: Tensor, start: int, end: int) -> Tensor:
    """A table without some of its rows."""
    return torch.cat([table[:start], table[end:]])


def without_row(table: Tensor, index: int) -> Tensor:
    return cut_out(table, index, index + 1)


def aligned_rows(table: Tensor, start: int, end: int) -> Tensor:
    """Rows of a table as they would be in memory of their own: products of a tensor that begins in
    the middle of a cache line may have other bits."""
    rows = table[start:end]
    offset = start * table.stride(0) * table.element_size() if start else 0
    return rows.clone() if offset % _ALIGNED else rows


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in for numbers stored in this one."""
    return torch.promote_types(dtype, torch.float32)


def working_dtype(x: Tensor) -> torch.dtype:
    """What products of these activations are computed in. Autocast leaves double precision."""
    if x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def needs_torchs_operations() -> bool:
    """Whether a compiler, a transform of torch.func or forward-mode derivatives are on: these
    support neither nodes of our own nor what is kept from one call to the next."""
    return torch.compiler.is_compiling() or (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    )


def over_last(rows: Tensor, x: Tensor) -> Tensor:
    """A row per sample, `[B, …]`, broadcast over what is between x's first and last dimensions."""
    between = x.dim() - rows.dim()
    return rows.view(rows.shape[0], *(1,) * between, *rows.shape[1:])


def over_channels(rows: Tensor, x: Tensor) -> Tensor:
    """A row per sample, `[B, C]`, broadcast over the dimensions after x's channels."""
    return over_space(rows, x.dim() - 2)


def over_space(rows: Tensor, dims: int) -> Tensor:
    """Numbers for channels, the last dimension, broadcast over `dims` after them."""
    return rows[(..., *(None,) * dims)]

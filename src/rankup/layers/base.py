"""The base class of the layers of a grown network that hold something per task."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rankup import seeds
from rankup.errors import RankupError, TaskStateError
from rankup.layers.placeholder import Placeholder
from rankup.layers.spec import HeadSpec, LayerSpec, kept_dtype, learned_dtype
from rankup.layers.tables import Selection
from rankup.layers.task_context import LEARNING, active_task
from rankup.layers.tensors import Tensors, at_least_float32, name_of, row_by_row
from rankup.rank import Place


@dataclass(frozen=True)
class Start:
    """How a new task starts.

    Args:
        selectors: where its selectors over old factors start.
        norms: where the weights of its norms start.
        factors: the length of its own factors' vectors.
        key: its name, which seeds its random numbers; if None, its number does.
        selection: the tasks from whose factors it selects.
        place: how many factors it adds and uses follows from this.
    """

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
    """A layer got an input whose number of rows is not the number of samples in the mixed batch.

    Raised with a message and the number of rows, because torch.compile cannot trace an exception
    with its own `__init__`.
    """

    @property
    def rows(self) -> int:
        return int(self.args[1])

    def __str__(self) -> str:
        return str(self.args[0])


class TaskLayer(nn.Module, ABC):
    """Base class of the layers that hold something per task.

    What committed tasks added is in tables, which are buffers with rows for each task; what the
    open task learns is in parameters named `new_…`. Which task the layer runs for is not stored in
    it: see `task_context.py`. So that other threads may run the layer at any time, tables are never
    modified in place but replaced, all at once.

    A task goes through these methods, in all layers together (see `rankup/net/stages.py`):

    1. `start` gives the values that it starts with.
    2. `open` makes them parameters.
    3. `learned` gives their values after training.
    4. `extended` gives the tables with the task's rows, without changing the layer.
    5. `close` removes the parameters, and `install` replaces the tables by the extended ones.

    A task that is abandoned is only closed. To remove a committed one, `without` gives the tables
    without its rows, and `drop` installs them.

    Args:
        spec: the layer's shapes and dtypes.
        seed: the network's seed.
        dtype: the network's dtype, for all that the spec does not give another dtype.
        device: where the tables are created.
    """

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
        """The values that the next task starts with, by key.

        Args:
            classes: how many rows the task's heads have.
            start: where selectors, norms and factors start.
        """

    @abstractmethod
    def extended(self, *added: Tensors, selections: Sequence[Selection] = (None,)) -> Tensors:
        """The tables, by name, with the rows of more tasks; the layer is not changed.

        Args:
            added: for each task its tensors, as `learned` gives them.
            selections: for each task, from which of those before it it selects.
        """

    @abstractmethod
    def added(self, task: int) -> Tensors:
        """What a committed task added, by key: the inverse of `extended`."""

    def merged(self, task: int) -> nn.Module:
        """A plain torch layer that computes what this one does for a committed task. Layers that
        only rival methods use need not implement it."""
        raise NotImplementedError

    def without(self, task: int) -> Tensors:
        """The tables, by name, without a committed task; the layer is not changed. Layers that only
        rival methods use need not implement it."""
        raise NotImplementedError

    def drop(self, task: int, tables: Tensors) -> None:
        """Remove a committed task. `tables` are what `without` gave for it."""
        self._buffers = {**self._buffers, **tables}
        self.count -= 1

    def open(self, values: Tensors, start: Start | None = None) -> None:
        """Begin a task: make these values, which `start` gave, parameters named `new_…`."""
        # All at once, here as in `close`: another thread may be copying the network.
        new = {f"new_{key}": nn.Parameter(value) for key, value in values.items()}
        self._parameters = {**self._parameters, **new}

    def learned(self) -> Tensors:
        """The current values of the open task, by key."""
        return {key.removeprefix("new_"): p.detach() for key, p in self.named_parameters()}

    def close(self) -> None:
        """Remove the parameters of the open task."""
        self._parameters = {}

    def install(self, tables: Tensors, selections: Sequence[Selection] = (None,)) -> None:
        """Replace the tables by those that `extended` gave, for the same `selections`."""
        # All tables at once: a thread that reads `_buffers` once has either the old or the new
        # ones, never some of each.
        self._buffers = {**self._buffers, **tables}
        # Last, so that a thread which runs one task finds it in the tables.
        self.count += len(selections)

    def take_attributes(self, original: nn.Module) -> None:
        """Copy all attributes but tensors from the layer that this one replaces, because the
        module's forward may read them."""
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
        """Whether a task is committed. For `LEARNING` this does not read `count`, or compiled code
        would depend on it and be compiled again for every task."""
        return task != LEARNING and 0 <= task < self.count

    def _learns(self, task: int) -> bool:
        """Whether a task is the open one."""
        # Not `bool(self._parameters)`, which some versions of torch.compile cannot trace.
        return len(self._parameters) > 0 and (task == LEARNING or task == self.count)

    def _task_read(self, what: str) -> int:
        """The active task, if it is a single one; otherwise refuse to let `what` be read."""
        task = active_task()
        if not isinstance(task, int):
            raise TaskStateError(self._unreadable(what))
        return task

    def _read_of_task(
        self, what: str, shape: Sequence[int], read: Callable[[int], Tensor]
    ) -> Tensor:
        """A tensor that the module's forward reads from the layer: for one active task what `read`
        gives, for a mixed batch a placeholder of that shape."""
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
        """The active task, or in a mixed batch the task of each sample, `[B]`."""
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
        """`x` in the dtype that tasks learn in, for layers that take little time to compute in it;
        they cast their output back. Under autocast `x` itself, which autocast casts as needed."""
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

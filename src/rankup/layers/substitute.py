"""Parameters of modules that run their own forward: the module reads the active task's tensor where
it reads its own.

A module of any class becomes one of a derived class, in which a property stands in for each
parameter. Nothing is swapped on the module, so threads may run different tasks at once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rankup.errors import TaskStateError
from rankup.layers.base import Start, TaskLayer, Tensors, row_by_row
from rankup.layers.factored import FactoredLayer
from rankup.layers.norm import TaskNorm
from rankup.layers.spec import TensorSpec, WeightSpec
from rankup.layers.task_context import active_task

STATISTICS = "statistics"  # the last part of the name of a batch norm's statistics

_PREFIX = "task_"  # of the names of layers that stand in for a module's tensors
_DERIVED = "_derived_by_rankup"


class FactoredWeight(FactoredLayer):
    """A parameter that is a sum of factors: `W_t = W₀ + Σ_i s_{i,t} · u_i v_iᵀ`, as a matrix with a
    row for each entry of its first dimension."""

    spec: WeightSpec

    def forward(self) -> Tensor:  # type: ignore[override]
        return self.matrix(_one_task(self)).view(self.spec.shape)

    def merged_tensor(self, task: int) -> Tensor:
        return self.matrix(task).view(self.spec.shape).clone()

    # It is never applied to an input itself.

    def _check(self, x: Tensor) -> None:
        raise NotImplementedError

    _positions = _map = _up = _map_each = _map_own = _per_channel = _per_sample = _check  # type: ignore[assignment]
    _pointwise = True


class TaskTensor(TaskLayer):
    """A parameter of which every task has its own: a bias, a norm's weight, a gain. Its table is
    `values [T, …]`; `base_value` is where tasks start."""

    spec: TensorSpec
    values: Tensor
    base_value: Tensor

    def __init__(
        self, spec: TensorSpec, seed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(spec, seed, dtype, device)
        self.register_buffer("values", torch.empty(0, *spec.shape, **self._factory))
        self.register_buffer("base_value", torch.zeros(spec.shape, **self._factory))

    def forward(self) -> Tensor:
        task = _one_task(self)
        if task < self.count:
            return self.values[task]
        return self.get_parameter("new_value")

    def start(self, classes: int, start: Start) -> Tensors:
        previous = start.norms == "previous" and self.count
        return {"value": (self.values[-1] if previous else self.base_value).clone()}

    def extended(self, *added: Tensors) -> Tensors:
        return {"values": torch.cat([self.values, *(tensors["value"][None] for tensors in added)])}

    def added(self, task: int) -> Tensors:
        return {"value": self.values[task]}

    def merged_tensor(self, task: int) -> Tensor:
        return self.values[task].clone()

    def base(self) -> Tensors:
        return {"value": self.base_value} if self.spec.kept else {}

    def start_from(self, value: Tensor) -> None:
        self.base_value = row_by_row(value.detach(), **self._factory)


def _one_task(layer: TaskLayer) -> int:
    task = active_task()
    if not isinstance(task, int):
        raise TaskStateError(
            f"{layer.spec.name!r} is each task's own and can be read only while the network runs "
            "for a single task"
        )
    if not 0 <= task <= layer.count or (task == layer.count and not layer._parameters):
        raise TaskStateError(f"{layer.spec.name!r} knows tasks 0 to {layer.count - 1}, not {task}")
    return task


def substitute(module: nn.Module, key: str, layer: TaskLayer) -> None:
    """Let a module read what a layer gives for the active task in place of its own parameter."""
    del module._parameters[key]
    name = f"{_PREFIX}{key}"
    module.add_module(name, layer)
    _derive(module, {key: property(lambda self: self._modules[name]())})


def substitute_statistics(module: _BatchNorm, norm: TaskNorm) -> None:
    """Let a batch norm read the active task's statistics, and pool those of a task that is
    committed. A task that is being learned has none: it is normalised by its batches."""
    for key in ("running_mean", "running_var", "num_batches_tracked"):
        module._buffers.pop(key, None)
    module.add_module(f"{_PREFIX}{STATISTICS}", norm)
    module.register_forward_pre_hook(_pool)

    def statistic(key: str) -> Callable[[Any], Tensor | None]:
        def read(self: Any) -> Tensor | None:
            own, task = self._modules[f"{_PREFIX}{STATISTICS}"], _one_statistic(self)
            return own.added(task)[key] if task < own.count else None

        return read

    _derive(
        module,
        {
            "running_mean": property(statistic("mean")),
            "running_var": property(statistic("var")),
            "num_batches_tracked": None,
            # A committed task's statistics are constant in either mode.
            "training": property(_learns_statistics, _set_mode),
        },
    )
    module.__dict__["_mode"] = module.__dict__.pop("training", True)


def restore(module: nn.Module, task: int) -> None:
    """Give a module its class back, with a committed task's tensors as its own."""
    layers = [
        (name.removeprefix(_PREFIX), layer)
        for name, layer in module._modules.items()
        if name.startswith(_PREFIX) and isinstance(layer, TaskLayer)
    ]
    if not layers:
        return
    for key, _ in layers:
        del module._modules[f"{_PREFIX}{key}"]
    module.__class__ = next(kind for kind in type(module).__mro__ if not vars(kind).get(_DERIVED))
    for key, layer in layers:
        if isinstance(layer, FactoredWeight | TaskTensor):
            module.register_parameter(key, nn.Parameter(layer.merged_tensor(task)))
        else:
            _restore_statistics(module, layer.added(task))
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()


def _restore_statistics(module: nn.Module, statistics: Tensors) -> None:
    module.training = module.__dict__.pop("_mode")
    for key in [key for key, hook in module._forward_pre_hooks.items() if hook is _pool]:
        del module._forward_pre_hooks[key]
    module.register_buffer("running_mean", statistics["mean"].clone())
    module.register_buffer("running_var", statistics["var"].clone())
    module.register_buffer("num_batches_tracked", torch.tensor(0))


def _one_statistic(module: Any) -> int:
    norm = module._modules[f"{_PREFIX}{STATISTICS}"]
    task = active_task()
    if not isinstance(task, int):
        raise TaskStateError(f"{norm.spec.name!r} are each task's own")
    return 0 if norm.spec.shared else task


def _learns_statistics(module: Any) -> bool:
    task, norm = active_task(), module._modules[f"{_PREFIX}{STATISTICS}"]
    is_committed = isinstance(task, int) and task < norm.count
    return bool(module.__dict__["_mode"]) and not is_committed


def _set_mode(module: Any, mode: bool) -> None:
    module.__dict__["_mode"] = mode


def _pool(module: Any, inputs: tuple[Any, ...]) -> None:
    norm = module._modules[f"{_PREFIX}{STATISTICS}"]
    if norm.pool is not None and active_task() == norm.count:
        norm.pool.add(inputs[0])


# Recurrent layers keep a list of their weights, which would stay as it was when it was made.
_RECURRENT: dict[str, Any] = {
    "_flat_weights": property(
        lambda self: [getattr(self, name) for name in self._flat_weights_names],
        lambda self, weights: None,
    ),
    "_init_flat_weights": lambda self: None,
    "flatten_parameters": lambda self: None,
    "__getstate__": nn.Module.__getstate__,
    "__setstate__": nn.Module.__setstate__,
}


def _derive(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Give a module a class of its own, derived from the one it has and of the same name."""
    kind = type(module)
    if issubclass(kind, nn.RNNBase):
        attributes = attributes | _RECURRENT
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, _DERIVED: True}
    module.__class__ = type(kind.__name__, (kind,), names | attributes)

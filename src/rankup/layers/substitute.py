"""Parameters of modules that run their own forward: the module reads the active task's tensor where
it reads its own.

A module of any class becomes one of a derived class, in which a property stands in for each
parameter. Nothing is swapped on the module, so threads may run different tasks at once.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations

from rankup.errors import TaskStateError
from rankup.layers.affine import affine_in
from rankup.layers.affine_class import STAND_INS, TAKES_ROWS, affine_class
from rankup.layers.base import Start, TaskLayer
from rankup.layers.factored import FactoredLayer
from rankup.layers.head import TaskHead
from rankup.layers.mixed_call import GatheringLayer, MixedTables
from rankup.layers.norm import TaskNorm
from rankup.layers.spec import TensorSpec, WeightSpec
from rankup.layers.tables import Selection, aligned_rows, without_row
from rankup.layers.task_context import active_task
from rankup.layers.tensors import Tensors, at_least_float32, row_by_row
from rankup.utils.per_thread import PerThread

STATISTICS = "statistics"  # the last part of the name of a batch norm's statistics
HEAD = "head"

_PREFIX = "task_"  # of the names of layers that stand in for a module's tensors
_TORCHS_OWN = {*vars(nn.Module())}
_running = PerThread[dict[Any, Any]]()  # what the forward that runs has read so far


class FactoredWeight(FactoredLayer):
    """A parameter, or one of the matrices that it stacks, that is a sum of factors: `W_t = W₀ +
    Σ_i s_{i,t} · u_i v_iᵀ`, as a matrix with a row for each output."""

    spec: WeightSpec

    def forward(self) -> Tensor:
        return self.tensor(_one_task(self))

    def tensor(self, task: int) -> Tensor:
        """The task's matrix in the shape and order that its module reads."""
        matrix = self.matrix(task)
        return (matrix.t() if self.spec.transposed else matrix).reshape(self.spec.shape)

    def base_of(self, tensor: Tensor) -> Tensors:
        """What is kept of the module's own tensor, or of its part of it."""
        outputs, inputs = self.spec.outputs, self.spec.inputs
        if self.spec.transposed:
            return {"weight": tensor.reshape(inputs, outputs).t()}
        return {"weight": tensor.reshape(outputs, inputs)}


class TaskTensor(GatheringLayer):
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
        self.neutral = 0.0  # what changes nothing, where the module scales or shifts by it
        self._wide = at_least_float32(self.dtype)

    def forward(self) -> Tensor:
        task = _one_task(self)
        if self._knows(task):
            return aligned_rows(self.values, task, task + 1)[0].to(self.computes_in)
        return self.get_parameter("new_value").to(self.computes_in)

    def start(self, classes: int, start: Start) -> Tensors:
        last = start.previous(self.count) if start.norms == "previous" else None
        return {"value": (self.base_value if last is None else self.values[last]).clone()}

    def extended(self, *added: Tensors, selections: Sequence[Selection] = (None,)) -> Tensors:
        return {"values": torch.cat([self.values, *(tensors["value"][None] for tensors in added)])}

    def without(self, task: int) -> Tensors:
        return {"values": without_row(self.values, task)}

    def added(self, task: int) -> Tensors:
        return {"value": self.values[task]}

    def tensor(self, task: int) -> Tensor:
        return self.values[task].to(self.computes_in)

    def of_mixed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Each sample's own, for `x` of a mixed batch, and a vector that changes nothing."""
        tasks = self._task(x)
        assert isinstance(tasks, Tensor)
        (rows,), (neutral,) = self._gathered(tasks, self._wide)
        return rows, neutral

    def mixed_sources(self) -> tuple[Tensor, ...]:
        return (self.values,)

    def mixed_tables(self, dtype: torch.dtype) -> MixedTables:
        values = self.values.view(-1, self.base_value.numel()).to(dtype)
        return MixedTables((values,), (self.constant(),))

    def constant(self) -> Tensor:
        """The vector that changes nothing, as the module reads it."""
        return torch.full_like(self.base_value, self.neutral, dtype=self.computes_in)

    def extra_repr(self) -> str:
        return f"shape={list(self.spec.shape)}, per task"

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
    if not (layer._knows(task) or layer._learns(task)):
        raise TaskStateError(f"{layer.spec.name!r} knows tasks 0 to {layer.count - 1}, not {task}")
    return task


StandIns = Mapping[str, Sequence[TaskLayer]]


def substitute(module: nn.Module, stand_ins: StandIns) -> None:
    """Let a module read what layers give for the active task in place of its own.

    Args:
        stand_ins: for each parameter the layer that gives it, or one for each of the matrices that
            are stacked in it; `STATISTICS` for a batch norm's running statistics, `HEAD` for the
            weight and bias of an output layer.
    """
    names: dict[str, list[str]] = {}
    attributes: dict[str, Any] = {STAND_INS: names}
    only_vectors = all(isinstance(layers[0], TaskTensor) for layers in stand_ins.values())
    affine = affine_in(module, [*stand_ins]) if only_vectors else None
    for key, layers in stand_ins.items():
        indices = range(len(layers)) if len(layers) > 1 else [""]
        names[key] = [f"{_PREFIX}{key}{index}" for index in indices]
        for name, layer in zip(names[key], layers, strict=True):
            module.add_module(name, layer)
        first = layers[0]
        if isinstance(first, TaskHead):
            attributes |= _head_attributes(module, names[key][0], first)
        elif isinstance(first, TaskNorm):
            attributes |= _statistics_attributes(module, names[key][0])
        else:
            attributes[key] = property(_reader(names[key]))
            module._parameters.pop(key, None)
            if is_parametrized(module, key):
                _freeze(module.get_submodule(f"parametrizations.{key}"))
    if affine is not None and not _caches(module):
        by_key = tuple((key, own[0]) for key, own in names.items())
        for key, (layer, *_) in stand_ins.items():
            layer.neutral = affine.neutral(key)  # type: ignore[assignment]
        kind: Any = type(module)
        module.__class__ = affine_class(kind, affine, by_key)
        return
    attributes |= {key: property(_cache(key), lambda self, value: None) for key in _caches(module)}
    _derive(module, attributes | {"forward": _reading_once(type(module).forward)})


def reads_one_task(body: nn.Module) -> bool:
    """Whether some module can run only for one task at a time."""
    derived = (vars(type(module)) for module in body.modules())
    return any(STAND_INS in names and TAKES_ROWS not in names for names in derived)


def restore(module: nn.Module, task: int, made: dict[TaskLayer, nn.Parameter]) -> None:
    """Give a module its class back, with a committed task's tensors as its own.

    Args:
        made: parameters made so far, for modules that share one.
    """
    derived: Any = type(module)
    if STAND_INS not in vars(derived):
        return
    module.__class__ = derived.__base__
    for key, names in vars(derived)[STAND_INS].items():
        layers: list[Any] = [module._modules.pop(name) for name in names]
        if isinstance(layers[0], TaskHead):
            _restore_head(module, layers[0].merged(task))
        elif isinstance(layers[0], TaskNorm):
            _restore_statistics(module, layers[0].added(task))
        else:
            if layers[0] not in made:
                tensor = _joined([layer.tensor(task) for layer in layers])
                made[layers[0]] = nn.Parameter(tensor.clone(memory_format=torch.contiguous_format))
            _restore_parameter(module, key, made[layers[0]])
    for key in _caches(module):
        module.__dict__[key] = {}
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()


def _reader(names: Sequence[str]) -> Callable[[Any], Tensor]:
    """Gives the active task's tensor, computed once in a forward, however often that reads it."""

    def read(self: Any) -> Tensor:
        first, *others = (self._modules[name] for name in names)
        known = _running.value
        if known is not None and first in known:
            return known[first]  # type: ignore[no-any-return]
        tensor = _joined([first(), *(layer() for layer in others)])
        if known is not None:
            known[first] = tensor
        return tensor

    return read


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def _cache(key: str) -> Callable[[Any], dict[Any, Any]]:
    """Gives a cache that lasts as long as the forward that fills it."""

    def read(self: Any) -> dict[Any, Any]:
        known = _running.value
        cache: dict[Any, Any] = {} if known is None else known.setdefault((self, key), {})
        return cache

    return read


def _caches(module: nn.Module) -> list[str]:
    """Attributes in which a module keeps what it has computed from its tensors: those of one task
    must not answer for another."""
    return [
        key
        for key, value in vars(module).items()
        if isinstance(value, dict) and key not in _TORCHS_OWN
        if all(isinstance(entry, Tensor) for entry in value.values())
    ]


def _freeze(parametrization: nn.Module) -> None:
    """Turn into buffers what a weight was made of, which nothing reads any more."""
    for key, parameter in [*parametrization._parameters.items()]:
        if parameter is not None:
            del parametrization._parameters[key]
            parametrization.register_buffer(key, parameter.detach(), persistent=False)


def _restore_parameter(module: nn.Module, key: str, parameter: nn.Parameter) -> None:
    if not is_parametrized(module, key):
        module.register_parameter(key, parameter)
        return
    parametrization = module.get_submodule(f"parametrizations.{key}")
    for name in [name for name in parametrization._buffers if name.startswith("original")]:
        original = parametrization.get_buffer(name).clone()
        delattr(parametrization, name)
        parametrization.register_parameter(name, nn.Parameter(original))
    try:
        with torch.no_grad():
            setattr(module, key, parameter.detach())
            is_exact = torch.allclose(getattr(module, key), parameter, rtol=1e-5, atol=1e-6)
    except (NotImplementedError, ValueError, RuntimeError):
        is_exact = False
    if not is_exact:  # no values of its own make this weight
        remove_parametrizations(module, key)
        module.register_parameter(key, parameter)


def _head_attributes(module: nn.Module, name: str, head: TaskHead) -> dict[str, Any]:
    for key in ("weight", "bias"):
        module._parameters.pop(key, None)
    width = "out_channels" if head.spec.taps else "out_features"
    return {
        "weight": property(lambda self: self._modules[name].weight),
        "bias": property(lambda self: self._modules[name].bias),
        width: property(lambda self: self._modules[name].out_features),
    }


def _restore_head(module: nn.Module, plain: Any) -> None:
    module.register_parameter("weight", plain.weight)
    module.register_parameter("bias", plain.bias)
    for key in ("out_features", "out_channels"):
        if hasattr(plain, key):
            module.__dict__[key] = getattr(plain, key)


def _statistics_attributes(module: nn.Module, name: str) -> dict[str, Any]:
    """Let a batch norm read the active task's statistics, and pool those of a task that is
    committed. A task that is being learned has none: it is normalised by its batches."""
    for key in ("running_mean", "running_var", "num_batches_tracked"):
        module._buffers.pop(key, None)
    module.register_forward_pre_hook(_pool)
    module.__dict__["_mode"] = module.__dict__.pop("training", True)

    def statistic(key: str) -> Callable[[Any], Tensor | None]:
        def read(self: Any) -> Tensor | None:
            own, task = self._modules[name], _one_statistic(self)
            return own.added(task)[key] if own._knows(task) else None

        return read

    return {
        "running_mean": property(statistic("mean")),
        "running_var": property(statistic("var")),
        "num_batches_tracked": None,
        # A committed task's statistics are constant in either mode.
        "training": property(_learns_statistics, _set_mode),
    }


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
    is_committed = isinstance(task, int) and norm._knows(task)
    return bool(module.__dict__["_mode"]) and not is_committed


def _set_mode(module: Any, mode: bool) -> None:
    module.__dict__["_mode"] = mode


def _pool(module: Any, inputs: tuple[Any, ...]) -> None:
    norm = module._modules[f"{_PREFIX}{STATISTICS}"]
    task = active_task()
    if norm.pool is not None and isinstance(task, int) and not norm._knows(task):
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
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    module.__class__ = type(kind.__name__, (kind,), names | attributes)


def _reading_once(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def read_once(*inputs: Any, **options: Any) -> Any:
        before = _running.value
        _running.value = {}
        try:
            return forward(*inputs, **options)
        finally:
            _running.value = before

    return read_once

"""Parameters per task in modules that run their own forward: where the module reads its own tensor,
it gets the active task's.

The module's class is replaced by a derived one, in which a property stands in for each parameter.
Nothing is swapped on the module, so threads may run different tasks at once.
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
from rankup.layers.base import TaskLayer
from rankup.layers.head import TaskHead
from rankup.layers.norm import TaskNorm
from rankup.layers.parameter_layers import TaskTensor
from rankup.layers.task_context import active_task
from rankup.layers.tensors import Tensors
from rankup.utils.derived import derived_class
from rankup.utils.per_thread import PerThread

STATISTICS = "statistics"  # the last part of the name of a batch norm's statistics
HEAD = "head"

_PREFIX = "task_"  # of the names of layers that stand in for a module's tensors
_TORCHS_OWN = {*vars(nn.Module())}
_running = PerThread[dict[Any, Any]]()  # what the current forward has read so far


StandIns = Mapping[str, Sequence[TaskLayer]]


def substitute(module: nn.Module, stand_ins: StandIns) -> None:
    """Let a module's forward read tensors that layers give for the active task.

    Args:
        stand_ins: for each parameter's name, the layer that gives the parameter, or a layer for
            each of the matrices stacked in it. `STATISTICS` stands for the running statistics of a
            batch norm, `HEAD` for the weight and bias of an output layer.
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
    """Whether some module in `body` can run for only one task at a time, not for mixed batches."""
    derived = (vars(type(module)) for module in body.modules())
    return any(STAND_INS in names and TAKES_ROWS not in names for names in derived)


def restore(module: nn.Module, task: int, made: dict[TaskLayer, nn.Parameter]) -> None:
    """Undo `substitute`: the module gets its class back, and a committed task's tensors become its
    own parameters.

    Args:
        made: the parameters created so far, which modules that share one look up.
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
    """Getter of a property: the active task's tensor, computed once per forward."""

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
    """Getter of a property: a dict that lasts for one forward."""

    def read(self: Any) -> dict[Any, Any]:
        known = _running.value
        cache: dict[Any, Any] = {} if known is None else known.setdefault((self, key), {})
        return cache

    return read


def _caches(module: nn.Module) -> list[str]:
    """Names of attributes that are dicts of tensors, in which a module caches what it has computed
    from its parameters. What was computed for one task must not be used for another."""
    return [
        key
        for key, value in vars(module).items()
        if isinstance(value, dict) and key not in _TORCHS_OWN
        if all(isinstance(entry, Tensor) for entry in value.values())
    ]


def _freeze(parametrization: nn.Module) -> None:
    """Turn the parameters of a parametrization, which nothing reads any more, into buffers."""
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
    if not is_exact:  # the parametrization cannot express this weight
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
    """Let a batch norm read the active task's statistics, and pool them while a task is committed.
    A task that is being learned has none and is normalised with the statistics of its batches."""
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


# Recurrent layers keep a list of their weights, which would go stale.
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
    """Give a module a class of its own with these attributes."""
    if isinstance(module, nn.RNNBase):
        attributes = attributes | _RECURRENT
    module.__class__ = derived_class(type(module), attributes)


def _reading_once(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward during which every tensor of the active task is computed at most once."""

    @wraps(forward)
    def read_once(*inputs: Any, **options: Any) -> Any:
        before = _running.value
        _running.value = {}
        try:
            return forward(*inputs, **options)
        finally:
            _running.value = before

    return read_once

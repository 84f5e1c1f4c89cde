"""Which layers `grow` knows and can replace, and which modules it refuses."""

import copy
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rankup.errors import RankupError
from rankup.growing.names import folded
from rankup.layers import CONVOLUTIONS, TaskLayer
from rankup.layers.spec import NormOver

WEIGHTED = (nn.Linear, *CONVOLUTIONS)
NORMS: dict[type[nn.Module], NormOver] = {
    nn.BatchNorm1d: "batch1d",
    nn.BatchNorm2d: "batch2d",
    nn.BatchNorm3d: "batch3d",
    nn.LayerNorm: "layer",
    nn.RMSNorm: "rms",
    nn.GroupNorm: "group",
}

Modules = Mapping[str, nn.Module]

BATCH_STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOW_HOOKS_ARE_CALLED = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_is_full_backward_hook",
)
# Attributes that decide what a layer computes. A derived class or a single layer may override them.
_COMPUTE_BY = ("__call__", "forward", "_conv_forward", "_check_input_dim", "weight", "bias")


def kind_of(layer: nn.Module) -> type[nn.Module] | None:
    return next((kind for kind in (*WEIGHTED, *NORMS) if isinstance(layer, kind)), None)


def computes_as_torchs_own(layer: nn.Module) -> bool:
    """Whether a layer is of a known class of torch, or of a derived one that computes the same."""
    kind = kind_of(layer)
    return kind is not None and not any(
        name in vars(layer) or getattr(type(layer), name, None) is not getattr(kind, name, None)
        for name in _COMPUTE_BY
    )


def has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, hooks) for hooks in _HOOKS)


def copy_hooks(source: nn.Module, target: nn.Module) -> None:
    """Make a module call the hooks of another one."""
    for key in (*_HOOKS, *_HOW_HOOKS_ARE_CALLED):
        setattr(target, key, copy.copy(getattr(source, key)))


def own_tensors(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers of each module, without those of its submodules."""
    for name, module in modules:
        for key, tensor in chain(module._parameters.items(), module._buffers.items()):
            if tensor is not None and key not in module._non_persistent_buffers_set:
                yield f"{name}.{key}".lstrip("."), tensor


def frozen_parts(module: nn.Module) -> set[str]:
    """The names of modules whose parameters are all frozen, and of all modules inside them."""
    names = set[str]()
    for name, layer in module.named_modules():
        wanted = [parameter.requires_grad for parameter in layer.parameters()]
        if wanted and not any(wanted):
            names.update(f"{name}.{inner}".strip(".") for inner, _ in layer.named_modules())
    return names


def uninitialised(module: nn.Module) -> list[str]:
    """The names of lazy layers that have not run yet, whose shapes are therefore not known."""
    return [
        name
        for name, layer in module.named_modules()
        if any(is_lazy(tensor) for tensor in chain(layer.parameters(False), layer.buffers(False)))
    ]


def refuse_module(module: nn.Module) -> None:
    """Raise if a module cannot be grown, whichever layers are chosen."""
    if not isinstance(module, nn.Module):
        raise RankupError(f"grow takes an nn.Module, got {type(module).__name__}")
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise RankupError(
            f"grow takes the module inside a {type(module).__name__}: pass module.module"
        )
    if lazy := uninitialised(module):
        raise RankupError(
            f"layers of the module are not initialised yet ({folded(lazy)}): run the module "
            "once on an input"
        )
    for name, layer in module.named_modules():
        where = repr(name) if name else "the module"
        if isinstance(layer, TaskLayer):
            raise RankupError(
                "the module is already a grown network: teach it more with begin_task"
            )
        if isinstance(layer, torch.jit.ScriptModule):
            raise RankupError(
                f"{where} was compiled with torch.jit, so its layers cannot be replaced: pass the "
                "module that it was made from"
            )
        if "_orig_mod" in layer._modules:
            raise RankupError(
                f"{where} was compiled with torch.compile, after which the bits of answers may "
                "change: pass the module inside, ._orig_mod"
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise RankupError(
                f"{where} has a max_norm, which shortens rows whenever they are read, although "
                "earlier tasks' answers depend on them: create it without one"
            )
    _refuse_arguments(module)


def _refuse_arguments(module: nn.Module) -> None:
    arguments = list(inspect.signature(module.forward).parameters.values())
    required = [argument for argument in arguments if argument.default is argument.empty]
    if any(argument.name == "task" for argument in required):
        raise RankupError(
            "the module's forward requires an argument named task, a name that a network uses "
            "itself: rename it"
        )
    if any(argument.name == "x" and argument is not arguments[0] for argument in required):
        raise RankupError(
            "the module's forward requires an argument named x that is not its first, but x is "
            "what a network calls its inputs: rename it"
        )


def obstacle(name: str, modules: Modules, read: Collection[str]) -> str | None:
    """Why a layer cannot be replaced by one of ours and has to run its own forward; None if it
    can.

    Args:
        read: the names of layers whose weights the module's forward reads directly.
    """
    layer = modules[name]
    kind = kind_of(layer)
    if kind is not None and not _is_plain(layer):
        return f"a {type(layer).__name__}, which is not a plain {kind.__name__}"
    if isinstance(layer, CONVOLUTIONS) and layer.groups != 1:
        return f"a grouped convolution, groups={layer.groups}"
    if has_hooks(layer):
        return "it has hooks"
    if name in read:
        return "the module's forward reads its weights directly"
    return shares_weight(name, modules)


def shares_weight(name: str, modules: Modules) -> str | None:
    """Which other layer has a parameter of this one, as part of a sentence; None if none has."""
    weights = {id(parameter) for parameter in modules[name].parameters()}
    for other, module in modules.items():
        if other != name and any(id(p) in weights for p in module._parameters.values()):
            return f"it shares a weight with {other!r}"
    return None


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer has nothing that would be missing from another that computes the same."""
    parameters = {"weight"} if isinstance(layer, nn.RMSNorm) else {"weight", "bias"}
    if set(layer._parameters) != parameters or layer._modules:
        return False
    if layer._buffers.keys() - BATCH_STATISTICS or not computes_as_torchs_own(layer):
        return False
    # A derived class may also have public attributes that torch's own layer does not have.
    more = {*dir(type(layer))} - {*dir(kind_of(layer))}
    return all(name.startswith("_") for name in more)

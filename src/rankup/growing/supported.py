"""Refusing parts of a module that can be neither factored nor kept per task, in one sentence that
tells what to exclude."""

import inspect
from collections.abc import Mapping

import torch
from torch import nn

from rankup.errors import RankupError
from rankup.growing.kinds import (
    WEIGHTED,
    is_plain,
    kind_of,
    own_tensors,
    uninitialised,
)
from rankup.growing.options import GrowOptions
from rankup.growing.trace import Trace
from rankup.layers import CONVOLUTIONS
from rankup.utils.torch_modes import has_hooks

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
Modules = Mapping[str, nn.Module]


def refuse_kinds(module: nn.Module) -> None:
    """Refuse what no choice of layers could fix."""
    if lazy := uninitialised(module):
        raise RankupError(
            f"layers of the module are not initialised yet ({', '.join(lazy)}): run the module "
            "once on an input"
        )
    for name, part in module.named_modules():
        where = repr(name) if name else "the module"
        if isinstance(part, torch.jit.ScriptModule):
            raise RankupError(
                f"{where} was compiled with torch.jit, so its layers cannot be replaced: pass the "
                "module that it was made from"
            )
        if "_orig_mod" in part._modules:
            raise RankupError(
                f"{where} was compiled with torch.compile, after which the bits of answers may "
                "change: pass the module inside, ._orig_mod"
            )
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise RankupError(
                f"{where} has a max_norm, which shortens rows whenever they are read, although "
                "earlier tasks' answers depend on them: create it without one"
            )
    forward = inspect.signature(module.forward).parameters
    if "task" in forward and forward["task"].default is inspect.Parameter.empty:
        raise RankupError(
            "the module's forward requires an argument named task, a name that a network uses "
            "itself: rename it"
        )
    after_first = [*forward.values()][1:]
    if any(argument.name == "x" and argument.default is argument.empty for argument in after_first):
        raise RankupError(
            "the module's forward requires an argument named x that is not its first, but x is "
            "what a network calls its inputs: rename it"
        )


def refuse_what_cannot_be(
    modules: Modules, replaced: set[str], head: str, options: GrowOptions, trace: Trace | None
) -> None:
    """Refuse a module where a part could be neither factored nor kept per task nor left alone.

    Args:
        modules: all parts of the module, by their names.
        replaced: those that layers of ours are to replace, except for the head.
    """
    problems = _problems(modules, replaced | {head}, options, trace)
    if head in problems:
        raise RankupError(
            f"the head {head!r} must be a plain Linear with a weight of its own "
            f"({problems[head]}): replace it, or name another layer with head="
        )
    if problems:
        listed = ", ".join(f"{name!r} ({reason})" for name, reason in problems.items())
        what_becomes = (
            "leave them as they are"
            if options.base == "keep"
            else "train them with the first task and leave them constant after it"
        )
        raise RankupError(
            f"cannot factor {listed}; pass exclude={[*options.exclude, *problems]} to "
            f"{what_becomes}"
        )


def _problems(
    modules: Modules, replaced: set[str], options: GrowOptions, trace: Trace | None
) -> dict[str, str]:
    """By name, why parts or their parameters are refused; of nested ones only the outermost."""
    found: dict[str, str] = {}
    for name, part in modules.items():
        if _is_inside(name, found) or options.excludes(name):
            continue
        if name in replaced:
            if reason := _obstacle(name, modules, trace):
                found[name] = reason
        elif _has_inner_layers(part):
            found[name] = type(part).__name__
        elif _is_torchs_layer(part) or is_plain(part):
            if any(True for _ in own_tensors([("", part)])) and not isinstance(part, WEIGHTED):
                found[name] = type(part).__name__
        else:
            for key, parameter in part._parameters.items():
                own = f"{name}.{key}".lstrip(".")
                if parameter is not None and not options.excludes(own):
                    found[own] = "a parameter of its own"
    return found


def _is_inside(name: str, found: Mapping[str, str]) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in found)


def _obstacle(name: str, modules: Modules, trace: Trace | None) -> str | None:
    """Why a layer of a known kind cannot be replaced."""
    part = modules[name]
    kind = kind_of(part)
    if kind is not None and not is_plain(part):
        return f"a {type(part).__name__}, which is not a plain {kind.__name__}"
    if isinstance(part, CONVOLUTIONS) and part.groups != 1:
        return f"a grouped convolution, groups={part.groups}"
    if has_hooks(part):
        return "it has hooks"
    if trace is not None and trace.reads_weights_of(name):
        return "the module's forward reads its weights directly"
    owned = {id(p) for p in part.parameters()}
    for other, other_part in modules.items():
        if other != name and any(id(p) in owned for p in other_part._parameters.values()):
            return f"it shares a weight with {other!r}"
    return None


def _is_torchs_layer(part: nn.Module) -> bool:
    return type(part).__module__.startswith("torch.nn.") and not isinstance(part, _CONTAINERS)


def _has_inner_layers(part: nn.Module) -> bool:
    """Torch's own composite layers read their inner layers' weights: none can be replaced."""
    return (
        _is_torchs_layer(part)
        and any(True for _ in part.children())
        and any(True for _ in part.parameters())
    )

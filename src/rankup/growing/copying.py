"""Copies of modules, and the refusal of layers that are not registered as submodules."""

import copy
from collections.abc import Iterator, Mapping
from itertools import chain

from torch import Tensor, nn

from rankup.errors import RankupError

_REGISTERED = ("_parameters", "_buffers", "_modules")


def copy_of(module: nn.Module, replacements: Mapping[int, object] | None = None) -> nn.Module:
    """A deep copy, which unlike `copy.deepcopy` works with non-leaf tensors that a forward has
    stored in the module, such as `self.features`.

    Args:
        replacements: by ids of modules and tensors, what the copy has in their place.
    """
    features = {
        id(value): value.detach().clone()
        for _, value in unregistered(module)
        if isinstance(value, Tensor) and not value.is_leaf
    }
    try:
        return copy.deepcopy(module, {**(replacements or {}), **features})
    except Exception as error:  # a module's own code may run
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RankupError(
            f"rankup works on a copy of the module, but the module cannot be copied: {reason[0]}"
        ) from error


def sharing_copy_of(
    module: nn.Module, replacements: Mapping[int, object] | None = None
) -> nn.Module:
    """A copy whose parameters and buffers lie in the same memory as the module's."""
    shared: dict[int, object] = {id(buffer): buffer.detach() for buffer in module.buffers()}
    shared |= {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in module.parameters()}
    return copy_of(module, {**shared, **(replacements or {})})


def refuse_hidden_layers(module: nn.Module) -> None:
    """Refuse a module that has layers in a plain list or dict: torch does not know about them, so
    they would neither learn nor be saved."""
    known = {id(layer) for layer in module.modules()}
    for name, value in unregistered(module):
        if isinstance(value, nn.Module) and id(value) not in known and _has_tensors(value):
            raise RankupError(
                f"{name!r} holds layers that torch does not know about, so they would neither "
                "learn nor be saved: make it an nn.ModuleList or nn.ModuleDict"
            )


def unregistered(module: nn.Module) -> Iterator[tuple[str, object]]:
    """The names and values of plain attributes of a module and its submodules. Of lists, tuples,
    sets and dicts each value inside, at any depth."""
    for name, layer in module.named_modules():
        for key, attribute in vars(layer).items():
            left = [] if key in _REGISTERED else [attribute]
            while left:
                value = left.pop()
                if isinstance(value, dict):
                    left.extend(value.values())
                elif isinstance(value, list | tuple | set):
                    left.extend(value)
                else:
                    yield f"{name}.{key}".lstrip("."), value


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in chain(module.parameters(), module.buffers()))

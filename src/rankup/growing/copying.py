"""Obstacles to copying a module: functions and references that a copy would share with it, extra
lists of its parameters, hidden layers, and activations that it has kept."""

import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from types import FunctionType, MethodType, ModuleType

from torch import Tensor, nn

from rankup.errors import RankupError


def refuse_functions_of(module: nn.Module, copied: nn.Module) -> None:
    """Refuse a module that holds functions which refer to its layers: in a copy they would go on
    running and training the original's. The copy is examined, because a class may recreate its
    functions there."""
    parts, seen = {id(part) for part in module.modules()}, set[int]()
    for name, part in copied.named_modules():
        for key, value in vars(part).items():
            if _leads_to(parts, value, seen):
                raise RankupError(
                    f"{f'{name}.{key}'.lstrip('.')!r} is or holds a function or a weak reference "
                    "that refers to the given module or a part of it, such as a lambda that uses "
                    "self, so a network would run the given module's layers through it: make it a "
                    "method"
                )


def refuse_listed_parameters(module: nn.Module) -> None:
    """Refuse a module that also keeps its parameters in a list of its own: what is not factored is
    swapped for other tensors from task to task, and the list would keep the old ones."""
    parameters = {id(parameter) for parameter in module.parameters()}
    for name, part, value in _attributes(module):
        if isinstance(part, nn.RNNBase):  # rebuilds its list whenever they are swapped
            continue
        if any(id(tensor) in parameters for tensor in _tensors_in(value)):
            raise RankupError(
                f"{name!r} holds parameters that the module also has under other names, and would "
                "keep the old ones when a network replaces them: make it a property"
            )


def refuse_hidden_layers(module: nn.Module) -> None:
    """Refuse a module that has layers in a plain list or dict: torch does not know of them, so
    they would neither learn nor be saved."""
    known = {id(part) for part in module.modules()}
    for name, _, value in _attributes(module):
        if any(id(layer) not in known for layer in _layers_in(value)):
            raise RankupError(
                f"{name!r} holds layers that torch does not know about, so they would neither "
                "learn nor be saved: make it an nn.ModuleList or nn.ModuleDict"
            )


def copied_or_refused(module: nn.Module) -> nn.Module:
    """A copy that shares all tensors."""
    shared = {id(tensor): tensor for tensor in chain(module.parameters(), module.buffers())}
    try:
        return copy_of(module, shared)
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RankupError(
            f"grow works on a copy of the module, but the module cannot be copied: {reason[0]}"
        ) from error


def copy_of(module: nn.Module, exchanged: Mapping[int, object] | None = None) -> nn.Module:
    """A copy that includes what a forward has stored in its module, such as `self.features`: torch
    does not copy non-leaf tensors.

    Args:
        exchanged: replacements for parts and tensors in the copy, by their ids.
    """
    tensors = (tensor for *_, value in _attributes(module) for tensor in _tensors_in(value))
    kept = {id(tensor): tensor.detach().clone() for tensor in tensors if not tensor.is_leaf}
    return copy.deepcopy(module, {**(exchanged or {}), **kept})


_TORCHS = ("_parameters", "_buffers", "_modules")


def _attributes(module: nn.Module) -> Iterator[tuple[str, nn.Module, object]]:
    """What the parts of a module hold besides what torch knows of: names, owners and values."""
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if key not in _TORCHS:
                yield f"{name}.{key}".lstrip("."), part, value


def leaves(value: object) -> Iterator[object]:
    """What plain containers hold, at any depth, or the value itself.

    >>> [*leaves([1, {"a": (2, 3)}])], [*leaves("one")]
    ([1, 2, 3], ['one'])
    """
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple | set):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


def _tensors_in(value: object) -> Iterator[Tensor]:
    return (leaf for leaf in leaves(value) if isinstance(leaf, Tensor))


def _layers_in(value: object) -> Iterator[nn.Module]:
    """Modules that have tensors."""
    for leaf in leaves(value):
        if isinstance(leaf, nn.Module) and [*leaf.parameters(), *leaf.buffers()]:
            yield leaf


def _leads_to(parts: set[int], value: object, seen: set[int]) -> bool:
    """Whether any of the parts can be reached from a value."""
    left = [value]
    while left:
        found = left.pop()
        if isinstance(found, nn.Module):
            if id(found) in parts:
                return True
        elif id(found) not in seen:
            seen.add(id(found))
            left.extend(_inside(found))
    return False


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, FunctionType):
        return [
            *_closed_over(value),
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
        ]
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple | set):
        return value
    if isinstance(value, type | ModuleType | Tensor):
        return ()
    return list(getattr(value, "__dict__", {}).values())  # any other kind of object


def _closed_over(function: FunctionType) -> Iterable[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue

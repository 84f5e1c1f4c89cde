"""What stands in the way of copying a module, as functions that it holds and that hold it: a copy
shares them."""

import copy
from collections.abc import Iterable
from functools import partial
from itertools import chain
from types import FunctionType, MethodType

from torch import nn

from rankup.errors import RankupError


def refuse_functions_of(module: nn.Module, copied: nn.Module) -> None:
    """Refuse a module that holds functions which refer to its layers: those of a copy would go on
    running and training the original's. A copy is looked at, because a class may make its functions
    anew."""
    parts, seen = {id(part) for part in module.modules()}, set[int]()
    for name, part in copied.named_modules():
        for key, value in vars(part).items():
            if _leads_to(parts, value, seen):
                raise RankupError(
                    f"{f'{name}.{key}'.lstrip('.')!r} is or holds a function that refers to the "
                    "given module or a part of it, as a lambda does that uses self, and a network "
                    "would run the given one's layers through it: make it a method"
                )


def copied_or_refused(module: nn.Module) -> nn.Module:
    """A copy that shares all tensors."""
    shared = {id(tensor): tensor for tensor in chain(module.parameters(), module.buffers())}
    try:
        return copy.deepcopy(module, shared)
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RankupError(
            f"grow works on a copy of the module, which cannot be made: {reason[0]}"
        ) from error


def _leads_to(parts: set[int], value: object, seen: set[int]) -> bool:
    if id(value) in seen or isinstance(value, nn.Module):
        return id(value) in parts
    seen.add(id(value))
    return any(_leads_to(parts, inner, seen) for inner in _inside(value))


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, FunctionType):
        return [*_closed_over(value), *(value.__defaults__ or ())]
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple | set) else ()


def _closed_over(function: FunctionType) -> Iterable[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue

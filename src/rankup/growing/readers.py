"""Which operations read a parameter: products, convolutions or others.

A weight in a layer of unknown class is a matrix if a product or a convolution reads it. That is
found in a trace by torch.fx, or in a run on inputs that the module provides.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from rankup import seeds
from rankup.growing.copying import copy_of

# By a product or a convolution, with the weight's outputs before its inputs or after them.
Reading = Literal["product", "transposed product", "convolution", "transposed convolution", "other"]

_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution")
_TRANSPOSED = tuple(f"conv_transpose{dims}d" for dims in (1, 2, 3))
_PRODUCTS = ("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "_grouped_mm", "grouped_mm")
_SUMS_OF_PRODUCTS = ("addmm", "baddbmm", "addbmm")  # the first argument is added
# Operations whose result has the same numbers in another shape or dtype.
_VIEWS = (
    "to",
    "type",
    "type_as",
    "float",
    "contiguous",
    "view",
    "reshape",
    "unsqueeze",
    "squeeze",
    "expand",
    "unbind",
    "chunk",
    "split",
)
_FLIPS = ("t", "transpose", "T", "mT", "permute")


def reading(op: str, position: int) -> Reading:
    """How an operation reads its argument at a position."""
    if op in _CONVOLUTIONS and position == 1:
        return "convolution"
    if op in _TRANSPOSED and position == 1:
        return "transposed convolution"
    if (op == "linear" and position == 1) or op in ("einsum", "bilinear"):
        return "product"
    if op in _PRODUCTS:
        return "product" if (position == 0) != (op == "__rmatmul__") else "transposed product"
    if op in _SUMS_OF_PRODUCTS and position > 0:
        return "product" if position == 1 else "transposed product"
    return "other"


def flipped(reading: Reading) -> Reading:
    """How a weight is read if what is read is its transpose."""
    flips: dict[Reading, Reading] = {
        "product": "transposed product",
        "transposed product": "product",
    }
    return flips.get(reading, reading)


def readings_in(graph: fx.Graph) -> dict[str, set[Reading]]:
    """How each parameter that a trace shows is read, by its name."""
    read: dict[str, set[Reading]] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            read.setdefault(str(node.target), set()).update(_readings_of(node, flips=False))
    return read


def _readings_of(node: fx.Node, flips: bool) -> Iterable[Reading]:
    for user in node.users:
        op = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
        if op == "getattr":
            if user.args[1] in _FLIPS:
                yield from _readings_of(user, not flips)
        elif op in _FLIPS:
            yield from _readings_of(user, not flips)
        elif (op in _VIEWS and user.args[0] is node) or _picks(op, user.args):
            yield from _readings_of(user, flips)
        else:
            for position, argument in enumerate(_flat(user.args)):
                if argument is node:
                    found = reading(op, position)
                    yield flipped(found) if flips else found
            if node in user.kwargs.values():
                found = reading(op, 1 if user.kwargs.get("weight") is node else 0)
                yield flipped(found) if flips else found


def _flat(arguments: Iterable[Any]) -> list[Any]:
    flat: list[Any] = []
    for argument in arguments:
        flat += list(argument) if isinstance(argument, tuple | list) else [argument]
    return flat


def _picks(op: str, arguments: Any) -> bool:
    """Whether an operation indexes by numbers or slices, as into a stack of matrices. Rows of an
    embedding are read by tensors of indices."""
    if op not in ("getitem", "__getitem__"):
        return False
    index = arguments[1]
    entries = index if isinstance(index, tuple) else (index,)
    return all(
        isinstance(entry, int | slice | None) or (isinstance(entry, Tensor) and not entry.dim())
        for entry in entries
    )


class _Watch(TorchFunctionMode):
    """Records how operations read the given parameters."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.read: dict[str, set[Reading]] = {name: set() for name in parameters}
        # By id: a tensor, the parameter that it is a view of and whether it is transposed. Tensors
        # are kept alive, because Python uses ids again.
        self._views = {id(p): (p, name, False) for name, p in parameters.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        op = getattr(func, "__name__", "")
        if op == "__get__":
            op = getattr(getattr(func, "__self__", None), "__name__", "")
        arguments = [*_flat(args), *(kwargs or {}).values()]
        for position, argument in enumerate(arguments):
            if not isinstance(argument, Tensor) or id(argument) not in self._views:
                continue
            _, name, flips = self._views[id(argument)]
            if (op in (*_VIEWS, *_FLIPS) and not position) or _picks(op, args):
                for view in _flat([result]):
                    if isinstance(view, Tensor):
                        self._views[id(view)] = view, name, flips != (op in _FLIPS)
                continue
            found = reading(op, position)
            if found != "other" or op in ("embedding", "__getitem__", "index_select"):
                self.read[name].add(flipped(found) if flips else found)
        return result


def readings_in_run(module: nn.Module, names: Iterable[str]) -> dict[str, set[Reading]]:
    """How these parameters are read when the module runs on its own `dummy_inputs`; empty if it has
    none, or if the run fails."""
    inputs = getattr(module, "dummy_inputs", None)
    if not isinstance(inputs, Mapping):
        return {}
    # A copy, because a forward may write to its module. It shares parameters.
    shared = {id(p): nn.Parameter(p.detach(), False) for p in module.parameters()}
    copied = copy_of(module, shared)
    watch = _Watch({name: copied.get_parameter(name) for name in names})
    device = next(module.parameters()).device
    try:
        with seeds.seeded_rng(device, 0), torch.no_grad(), watch:
            copied.eval()(**{key: value.to(device) for key, value in inputs.items()})
    except Exception:  # of the module's own code: anything may be raised
        return {}
    return watch.read

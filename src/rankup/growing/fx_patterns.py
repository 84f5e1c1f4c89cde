"""The ways to flatten each sample, as torch.fx records them."""

import inspect
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn


def flattens(call: fx.Node, x: fx.Node) -> bool:
    """Whether a call does what `x.flatten(1)` does. `x.view(-1, n)` does so only for samples
    of n numbers: how many they have is not known until a task's data is."""
    if call.op not in ("call_function", "call_method"):
        return False
    if call.target in (torch.flatten, "flatten") and len(call.args) <= 3:
        given = dict(zip(("input", "start_dim", "end_dim"), call.args, strict=False))
        wanted = {"input": x, "start_dim": 1, "end_dim": -1}
        return {"end_dim": -1, **given, **call.kwargs} == wanted
    if call.target not in (torch.reshape, "reshape", "view") or call.kwargs:
        return False
    of, *sizes = call.args
    shape: Any = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], list | tuple) else sizes
    if of is not x or len(shape) != 2 or not isinstance(shape[1], int):
        return False
    samples, numbers = shape
    return _counts_samples(samples, x) or (samples == -1 and numbers > 0)


def only_reader(x: fx.Node) -> fx.Node | None:
    """The only reader of a node, apart from sizes of it that only this reader takes."""
    for reader in x.users:
        sizes = [size for size in reader.all_input_nodes if size is not x]
        sizes += [shape for size in sizes for shape in size.all_input_nodes if shape is not x]
        if all(set(node.users) <= {reader, *sizes} for node in (x, *sizes)):
            return reader
    return None


@contextmanager
def recorded_lengths(module: nn.Module) -> Iterator[None]:
    """Inside, `len(x)` in a forward of the module's own classes is recorded like `x.size(0)`.
    Python's `len` must return a number, which torch.fx does not have yet."""
    found = (inspect.unwrap(type(part).forward) for part in module.modules() if _is_own(part))
    spaces = [getattr(forward, "__globals__", {}) for forward in found]
    spaces = [space for space in spaces if "len" not in space]
    for space in spaces:
        space["len"] = _length
    try:
        yield
    finally:
        for space in spaces:
            space.pop("len", None)


def _is_own(part: nn.Module) -> bool:
    return not type(part).__module__.startswith("torch.")


def _length(of: Any) -> Any:
    if isinstance(of, fx.Proxy):
        return of.tracer.create_proxy("call_function", len, (of,), {})
    return len(of)


def _counts_samples(size: Any, x: fx.Node) -> bool:
    if not isinstance(size, fx.Node):
        return False
    if size.op == "call_function" and size.target is operator.getitem:
        shape, place = size.args
        return bool(place == 0) and _is_shape(shape, x)
    if size.op == "call_method" and size.target == "size":
        return (*size.args, *size.kwargs.values()) == (x, 0)
    return size.op == "call_function" and size.target is len and size.args == (x,)


def _is_shape(shape: Any, x: fx.Node) -> bool:
    if not isinstance(shape, fx.Node):
        return False
    if shape.op == "call_method":
        return shape.target == "size" and shape.args == (x,) and not shape.kwargs
    return shape.op == "call_function" and shape.target is getattr and shape.args == (x, "shape")

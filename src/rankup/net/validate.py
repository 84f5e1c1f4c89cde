"""Checks of what a network is given."""

import math
import operator
import unicodedata
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rankup.errors import RankupError, TaskStateError
from rankup.layers import Start, TaskLayer, Tensors
from rankup.layers.spec import Spec, tensor_name
from rankup.rank import as_python

if TYPE_CHECKING:
    from rankup.net.tasks import KnownTask


def task_name(name: object, known: Container[str]) -> str:
    if not isinstance(name, str) or not name.strip():
        raise RankupError(f"a task needs a name, got {name!r}")
    if name != name.strip() or any(
        char in "/\\" or unicodedata.category(char).startswith("C") for char in name
    ):
        raise RankupError(
            "a task's name must not contain a slash or a control character, nor start or end with "
            f"a space, got {name!r}"
        )
    if (length := len(name.encode())) > 200:
        raise RankupError(f"a task's name must be at most 200 bytes long, got {length}")
    if name in known:
        raise RankupError(f"there is already a task {name!r}")
    return name


def class_count(classes: Any) -> int:
    try:
        count = 0 if isinstance(classes, bool) else operator.index(classes)
    except TypeError:
        count = 0
    if count < 2:
        raise RankupError(f"classes must be a whole number of at least 2, got {classes!r}")
    if count >= 2**31:
        raise RankupError(f"a head cannot have as many classes as {count}")
    return count


def start(selectors: Any, norms: Any, factors: Any) -> Start:
    selectors, factors = as_python(selectors), as_python(factors)
    if selectors != "previous" and not _is_number(selectors):
        raise RankupError(f"selectors must start at a number or 'previous', got {selectors!r}")
    if norms not in ("fresh", "previous"):
        raise RankupError(f"norms must start 'fresh' or 'previous', got {norms!r}")
    if not _is_number(factors) or factors <= 0:
        raise RankupError(f"factors must start with a positive length, got {factors!r}")
    return Start(selectors, norms, factors)


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)


def state(net: nn.Module, given: Mapping[str, Any], strict: bool, assign: bool) -> None:
    """Refuse a state dict that is not of a network with the same tasks."""
    own = net.state_dict()
    if strict and (others := own.keys() ^ given.keys()):
        name = min(others)
        _refuse_state(f"{name!r} is only {'in it' if name in given else 'here'}")
    for name, tensor in own.items():
        pair = tensor, given.get(name, tensor)
        here, there = (list(getattr(one, "shape", [])) for one in pair)
        if here != there:  # a module's own state may be something else than a tensor
            _refuse_state(f"{name!r} has shape {there}, but {here} here")
        own_dtype, dtype = (getattr(one, "dtype", None) for one in pair)
        if assign and dtype != own_dtype:  # else torch converts it
            _refuse_state(f"{name!r} is in {dtype}, but in {own_dtype} here")
    for name, part in net.named_modules():
        if isinstance(part, TaskLayer) and (reason := part.misfit(given, f"{name}.")):
            _refuse_state(reason)


def _refuse_state(reason: str) -> None:
    raise TaskStateError(
        f"the state is not from a network with the same layers and tasks: {reason}; use "
        "rankup.save and rankup.load to keep whole networks"
    )


def inputs(x: Any, dtype: torch.dtype) -> None:
    if isinstance(x, Tensor) and x.dtype is torch.uint8:
        raise RankupError(
            f"inputs are torch.uint8, but the network computes in {dtype}: pass "
            "rankup.data.to_float(x)"
        )
    if isinstance(x, np.ndarray):
        raise RankupError("inputs must be a tensor, got a NumPy array: pass torch.from_numpy(x)")


def batch(given: Any) -> tuple[Any, dict[str, Any]]:
    """The inputs to run the module on, and its own options."""
    x, options = given, {}
    if isinstance(given, tuple | list):
        if len(given) != 2 or not isinstance(given[1], dict):
            raise TaskStateError(
                "calibrate must yield batches of inputs, or pairs of such a batch and a dict of "
                f"the module's own options, got a {type(given).__name__}; if a loader also yields "
                "labels, pass (x for x, _ in loader)"
            )
        x, options = given
    if isinstance(x, Tensor) and not len(x):
        raise TaskStateError("calibrate must yield batches with samples, got an empty one")
    return x, options


def learned(spec: Spec, tensors: Tensors, index: int, task: "KnownTask") -> None:
    """Refuse to commit a part whose parameters are not of the shapes that the task began with."""
    expected = spec.shapes(index, task.classes)
    found = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    for key in {**expected, **found}:
        pair = found.get(key), expected.get(key)
        if pair[0] != pair[1]:
            there, wanted = ("missing" if shape is None else list(shape) for shape in pair)
            raise TaskStateError(
                f"task {task.name!r} cannot be committed: {tensor_name(spec, key)} is {there}, not "
                f"{wanted} as at its start, as happens after pruning; restore its parameters, or "
                "call abandon_task"
            )


def listed(names: list[str]) -> str:
    if not names:
        return "none"
    shown = ", ".join(repr(name) for name in names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"

"""Checks of what a network is given: inputs, batches for calibration, and where a task starts."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankup.errors import RankupError, TaskStateError
from rankup.layers import Start, Tensors
from rankup.layers.spec import Spec, tensor_name
from rankup.net.mixed import MISSING
from rankup.net.tasks import KnownTask
from rankup.rank import Place, as_python
from rankup.utils.compiling import run_as_it_is


def start(selectors: Any, norms: Any, factors: Any, **chosen: Any) -> Start:
    """A `Start` from a user's arguments; `chosen` are its other fields."""
    selectors, factors = as_python(selectors), as_python(factors)
    if selectors not in ("previous", "halfway") and not _is_number(selectors):
        raise RankupError(
            f"selectors must start at a number, 'previous' or 'halfway', got {selectors!r}"
        )
    if norms not in ("fresh", "previous"):
        raise RankupError(f"norms must start 'fresh' or 'previous', got {norms!r}")
    if not _is_number(factors) or factors <= 0:
        raise RankupError(f"factors must start with a positive length, got {factors!r}")
    return Start(selectors, norms, factors, **chosen)


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)


@run_as_it_is
def inputs(x: Any, dtype: torch.dtype, options: dict[str, Any]) -> None:
    # None may be right if there are options, from which some modules take their inputs.
    if x is None and not options:
        raise RankupError("inputs must be a tensor, or what else the module takes, got None")
    if isinstance(x, Tensor) and x.dtype is torch.uint8:
        raise RankupError(
            f"inputs are torch.uint8, but the network computes in {dtype}: pass "
            "rankup.data.to_float(x)"
        )
    if isinstance(x, np.ndarray):
        raise RankupError("inputs must be a tensor, got a NumPy array: pass torch.from_numpy(x)")


def batch(given: Any) -> tuple[Any, dict[str, Any]]:
    """A batch for calibration as the module's first argument and its others, by name."""
    x, options = given, {}
    if isinstance(given, tuple | list):
        if len(given) != 2 or not isinstance(given[1], dict):
            raise TaskStateError(
                "calibrate must yield batches of inputs, or pairs of such a batch and a dict of "
                f"the module's own options, got a {type(given).__name__}; if a loader also yields "
                "labels, pass (x for x, _ in loader)"
            )
        x, options = given
        if x is None:
            return MISSING, options
    if isinstance(x, Tensor) and not len(x):
        raise TaskStateError("calibrate must yield batches with samples, got an empty one")
    return x, options


def learned(spec: Spec, tensors: Tensors, place: Place, task: KnownTask) -> None:
    """Raise if the parameters of a part no longer have the shapes with which the task began."""
    expected = spec.shapes(place, task.rows)
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

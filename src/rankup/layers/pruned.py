"""Tensors of which a task has dropped numbers: a file holds the kept numbers and a bit mask.

A number is dropped if it is zero in its stored form. If the selector of one of the task's own
factors is dropped, the factor is, too. In memory all tensors keep their shapes, with zeros for
dropped numbers, so answers have the same bits.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rankup.layers.spec import FactoredSpec, HeadSpec, Shapes, Spec
from rankup.layers.tensors import Tensors
from rankup.rank import Place

KEPT = ".kept"  # suffix of a bit mask's name
OWN = ("U", "V")  # keys of tensors whose rows are dropped with their selectors

Kept = Mapping[str, int]  # how many numbers a task kept of each tensor of a layer; of U, rows


def keys_of(spec: Spec) -> tuple[str, ...]:
    """The keys of a layer's tensors of which a task may drop numbers."""
    if isinstance(spec, FactoredSpec) and spec.rank.prune:
        return ("selector", "bias") if spec.has_own_bias else ("selector",)
    if isinstance(spec, HeadSpec) and spec.prune:
        return ("weight", "bias") if spec.bias else ("weight",)
    return ()


def masks_of(spec: Spec, values: Tensors) -> Tensors:
    """Masks of what a task keeps, by key; of U and V with an entry for each row. Empty if tensors
    of which it may drop numbers are missing, as among those of a kept base."""
    keys = keys_of(spec)
    if not values.keys() >= {*keys}:
        return {}
    masks = {key: values[key] != 0 for key in keys}
    if masks and "U" in values:
        masks |= dict.fromkeys(OWN, of_own(masks["selector"], len(values["U"])))
    return masks


def of_own(is_kept: Tensor, own: int) -> Tensor:
    """Which of a task's own factors it keeps: those are the last ones."""
    return is_kept[len(is_kept) - own :]


def count(masks: Tensors) -> dict[str, int]:
    return {key: int(mask.sum()) for key, mask in masks.items() if key != "V"}


def most_of(spec: Spec, place: Place, rows: int) -> dict[str, int]:
    """How many numbers a task may keep of each tensor; of U, rows."""
    shapes = spec.shapes(place, rows)
    most = {key: math.prod(shapes[key]) for key in keys_of(spec)}
    return most | ({"U": shapes["U"][0]} if "U" in shapes else {})


def shapes_of(shapes: Shapes, kept: Kept) -> Shapes:
    """The shapes of a task's tensors without what it dropped.

    >>> kept = {"selector": 5, "U": 1, "bias": 2}
    >>> shapes_of({"selector": (9,), "U": (2, 4), "V": (2, 3), "bias": (4,)}, kept)
    {'selector': (5,), 'U': (1, 4), 'V': (1, 3), 'bias': (2,)}
    """
    return {
        key: (kept["U"], *shape[1:]) if key in OWN else (kept.get(key, math.prod(shape)),)
        for key, shape in shapes.items()
    }


def covers(mask: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a mask has an entry for each number, or each row, of a tensor of that shape."""
    return shape[: mask.dim()] == mask.shape


def zeroed(values: Tensors, masks: Tensors) -> Tensors:
    """Values with zeros for what was dropped.

    >>> zeroed({"U": torch.ones(2, 1)}, {"U": torch.tensor([True, False])})["U"]
    tensor([[1.],
            [0.]])
    """
    return {
        key: restored(value[masks[key]], masks[key], value.shape) if key in masks else value
        for key, value in values.items()
    }


def restored(kept: Tensor, mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `tensor[mask]`, with zeros for what is not kept."""
    whole = kept.new_zeros(shape)
    whole[mask.to(kept.device)] = kept
    return whole


def to_bits(mask: Tensor) -> Tensor:
    """A bit for each number, the first one the lowest of its byte.

    >>> to_bits(torch.tensor([True, False, True, False, False, False, False, False, True]))
    tensor([5, 1], dtype=torch.uint8)
    """
    return torch.from_numpy(np.packbits(mask.cpu().numpy(), bitorder="little"))


def from_bits(bits: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `to_bits` for that shape; ValueError if these are not its bits.

    >>> from_bits(torch.tensor([5], dtype=torch.uint8), (3,))
    tensor([ True, False,  True])
    """
    numbers = math.prod(shape)
    size = -(-numbers // 8)
    if bits.dtype != torch.uint8 or list(bits.shape) != [size]:
        raise ValueError(
            f"{list(bits.shape)} of {bits.dtype}, not {size} bytes for {numbers} numbers"
        )
    unpacked = np.unpackbits(bits.cpu().numpy(), bitorder="little").astype(bool)
    if unpacked[numbers:].any():
        raise ValueError(f"more than {numbers} numbers")
    return torch.from_numpy(unpacked[:numbers]).view(shape)

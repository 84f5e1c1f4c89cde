"""What a file holds of a layer that has dropped factors: which ones the task kept, a bit for each,
and the numbers of these alone.

A factor is dropped where its selector is zero as stored. In memory all tables stay as they are,
with zeros for what was dropped, so answers come from the same shapes and have the same bits.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rankup.layers.base import Tensors
from rankup.layers.spec import FactoredSpec, Shapes, Spec

KEPT = "kept"  # a file's name for the bits


class Kept(NamedTuple):
    """How many factors a task kept of a layer, and how many of these it has learned itself."""

    factors: int
    own: int


def prunes(spec: Spec) -> bool:
    return isinstance(spec, FactoredSpec) and spec.rank.prune


def count(is_kept: Tensor, own: int) -> Kept:
    """What a task kept that adds that many factors, which are its last."""
    return Kept(int(is_kept.sum()), int(_of_own(is_kept, own).sum()))


def shapes_of(shapes: Shapes, kept: Kept) -> Shapes:
    """The shapes of a task's tensors in a file, where it keeps that many factors.

    >>> shapes_of({"selector": (9,), "U": (2, 4), "V": (2, 3), "bias": (4,)}, Kept(5, 1))
    {'selector': (5,), 'U': (1, 4), 'V': (1, 3), 'bias': (4,)}
    """
    stored = dict(shapes) | {"selector": (kept.factors,)}
    return stored | {key: (kept.own, *shapes[key][1:]) for key in ("U", "V") if key in shapes}


def without_dropped(values: Tensors, is_kept: Tensor) -> Tensors:
    """A task's tensors without what belongs to factors that it dropped."""
    own = _of_own(is_kept, len(values.get("U", ())))
    kept = dict(values) | {"selector": values["selector"][is_kept]}
    return kept | {key: values[key][own] for key in ("U", "V") if key in values}


def with_dropped(kept: Tensors, is_kept: Tensor, own: int) -> Tensors:
    """The inverse of `without_dropped`: zeros for what was dropped, of that many own factors.

    >>> values = {"selector": torch.tensor([0.0, 3, 0, 2]), "U": torch.tensor([[0.0], [5]])}
    >>> is_kept = values["selector"] != 0
    >>> with_dropped(without_dropped(values, is_kept), is_kept, own=2)["U"]
    tensor([[0.],
            [5.]])
    """
    rows = {"selector": is_kept, **dict.fromkeys(("U", "V"), _of_own(is_kept, own))}
    return {key: _spread(value, rows[key]) if key in rows else value for key, value in kept.items()}


def to_bits(is_kept: Tensor) -> Tensor:
    """A bit for each factor, the first one the lowest of its byte.

    >>> to_bits(torch.tensor([True, False, True, False, False, False, False, False, True]))
    tensor([5, 1], dtype=torch.uint8)
    """
    return torch.from_numpy(np.packbits(is_kept.cpu().numpy(), bitorder="little"))


def from_bits(bits: Tensor, factors: int) -> Tensor:
    """The inverse of `to_bits` for that many factors; ValueError if these are not its bits.

    >>> from_bits(torch.tensor([5], dtype=torch.uint8), 3)
    tensor([ True, False,  True])
    """
    if bits.dtype != torch.uint8 or list(bits.shape) != [bytes_of(factors)]:
        raise ValueError(
            f"{list(bits.shape)} of {bits.dtype}, not {bytes_of(factors)} bytes for {factors} "
            "factors"
        )
    unpacked = np.unpackbits(bits.cpu().numpy(), bitorder="little").astype(bool)
    if unpacked[factors:].any():
        raise ValueError(f"more than {factors} factors")
    return torch.from_numpy(unpacked[:factors])


def bytes_of(factors: int) -> int:
    return -(-factors // 8)


def _of_own(is_kept: Tensor, own: int) -> Tensor:
    return is_kept[len(is_kept) - own :]


def _spread(kept: Tensor, is_kept: Tensor) -> Tensor:
    table = kept.new_zeros(len(is_kept), *kept.shape[1:])
    table[is_kept.to(kept.device)] = kept
    return table

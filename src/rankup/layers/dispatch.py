"""Rules that choose the form in which a layer runs. They depend on shapes alone, not on timing, so
that the same shapes always give the same bits."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

# What a compiled network assumes: if its form followed the batch's size, it would be compiled again
# for each size at which another form becomes cheaper.
_COMPILED_SAMPLES, _COMPILED_LENGTH = 32, 64


def samples_to_plan(x: Tensor) -> int:
    """The number of samples to choose a form for."""
    return _COMPILED_SAMPLES if torch.compiler.is_compiling() else len(x)


def length_to_plan(x: Tensor) -> int:
    """The number of positions per sample of `x [B, …, n]` to choose a form for."""
    if torch.compiler.is_compiling():
        return 1 if x.dim() == 2 else _COMPILED_LENGTH
    return x.shape[1:-1].numel()


MERGES_ON = {"cuda"}  # devices on which committed tasks run with merged weights
MOST_MERGED = 1 << 29  # numbers in a network's kept weights, above which none are merged


def dense_is_cheaper(
    positions: int, rank: int, inputs: int, outputs: int, *, kept: bool = False
) -> bool:
    """Whether building W and applying it takes fewer multiplications than applying the factors.

    Later tasks cannot change this, and with it the bits, because it depends on the task's own rank.

    Args:
        positions: how many times W is applied.
        rank: how many factors the task selects from.
        kept: whether there is a kept weight, which is a part of W but must otherwise be applied
            besides the factors.
    """
    dense = rank * inputs * outputs + positions * inputs * outputs
    factored = positions * rank * (inputs + outputs)
    if kept:
        factored += positions * inputs * outputs
    return dense < factored


def merging_is_cheaper(positions: int, inputs: int, outputs: int) -> bool:
    """Whether a training step merges a kept weight and the factors, forward and again backward,
    rather than applying the factors beside it.

    Either way it needs the hidden channels and their gradients, so the rank cancels out. Counting
    multiplications, the 3 below would be a 2, but merging also moves the weight: on a CPU, steps of
    MiniLM's size took longer with merging for 512 positions, and less time for 2,048.
    """
    return 3 * inputs * outputs < positions * (inputs + outputs)


MixedWay = Literal["hidden", "factors", "weights"]


class MixedShape(NamedTuple):
    """The numbers by which `mixed_way` decides."""

    samples: int
    positions: int  # positions in a sample at which the layer applies its matrix
    tasks: int
    rank: int
    inputs: int
    outputs: int
    pointwise: bool  # not a kernel of several taps


class _MixedCost(NamedTuple):
    """How many multiplications a device does while it moves one number to or from memory."""

    multiplications: float
    with_own_kernels: float  # in a convolution that has a kernel per sample


_MIXED_COST = {"cpu": _MixedCost(12, 12), "cuda": _MixedCost(40, 1)}


def mixed_way(shape: MixedShape, device: str) -> MixedWay:
    """How a factored layer runs a mixed batch: the cheapest way, measured in numbers moved.

    - `"hidden"`: each sample's selectors scale the hidden channels that V gives.
    - `"factors"`: they scale U, which gives a matrix `[out, R]` per sample.
    - `"weights"`: factors are summed to a weight per sample.
    """
    samples, positions, tasks, rank, inputs, outputs, pointwise = shape
    at_once, with_own_kernels = _MIXED_COST.get(device, _MIXED_COST["cpu"])
    hidden = samples * positions * rank
    with_factors = hidden * (inputs + outputs) / at_once
    by_hidden = with_factors + 4 * hidden
    by_factors = with_factors + 2 * hidden + 2 * samples * rank * outputs
    building = min(tasks, samples) * outputs * inputs * (2 + rank / at_once)
    with_weights = (
        samples * positions * inputs * outputs / (at_once if pointwise else with_own_kernels)
    )
    by_weights = with_weights + 2 * samples * outputs * inputs + building
    if by_weights < min(by_hidden, by_factors):
        return "weights"
    return "hidden" if by_hidden <= by_factors else "factors"


def joins_hidden(inputs: int, outputs: int, device: str) -> bool:
    """Whether a mixed batch's hidden channels are put beside its inputs, for one product with the
    kept weight and U. This moves all inputs once more; two products move all outputs once more."""
    return device in MERGES_ON and inputs <= outputs


HeadsWay = Literal["gathered", "together", "sorted"]


class HeadsShape(NamedTuple):
    """The numbers by which `heads_way` decides."""

    samples: int
    positions: int  # positions in a sample for which there is an answer
    tasks: int
    inputs: int
    widest: int  # classes of the task with the most
    total: int  # classes of all tasks


class _HeadsCost(NamedTuple):
    """What else a device could do in the time of moving numbers to or from memory."""

    multiplications: float  # in the time of moving one number
    sorting: float  # numbers moved in the time of sorting a batch by task
    starting: float  # and in that of starting the operations for the logits of all tasks


_HEADS_COST = {"cpu": _HeadsCost(4, 5 << 18, 0), "cuda": _HeadsCost(20, 1 << 27, 1 << 22)}


def heads_way(shape: HeadsShape, device: str) -> HeadsWay:
    """How heads run a mixed batch: the cheapest way, measured in numbers moved.

    - `"gathered"`: a head is copied for each sample.
    - `"together"`: the logits of all tasks are computed, and each sample's picked from them.
    - `"sorted"`: samples are sorted by task, and a head is copied for each block of them.
    """
    samples, positions, tasks, inputs, widest, total = shape
    at_once, sorting, starting = _HEADS_COST.get(device, _HEADS_COST["cpu"])
    size = block_size(samples, tasks)
    blocks = block_count(samples, tasks, size)
    together = starting + samples * positions * total * (2 + inputs / at_once)
    gathered = 3 * samples * widest * inputs
    sorted_ = sorting + 3 * blocks * (widest * inputs + size * positions * (inputs + widest))
    if together <= min(gathered, sorted_):
        return "together"
    return "gathered" if gathered <= sorted_ else "sorted"


def block_size(samples: int, tasks: int) -> int:
    """How many samples of one task make a block. Small enough that unused places, at most a block
    for each task, are few compared to the batch."""
    return max(1, samples // (2 * max(1, tasks)))


def block_count(samples: int, tasks: int, size: int) -> int:
    """How many blocks there can be at most, however the samples spread over the tasks."""
    return (samples + min(samples, tasks) * (size - 1)) // size

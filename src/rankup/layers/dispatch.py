"""Rules that choose the form in which a layer runs, by shapes alone, never by timing: the same
shapes give the same bits every time."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

_COMPILED_SAMPLES, _COMPILED_LENGTH = 32, 64


def samples_to_plan(x: Tensor) -> int:
    """For how many samples to choose a form. A compiled network takes the same one for any batch,
    or it would be compiled again at each size where another one becomes cheaper."""
    return _COMPILED_SAMPLES if torch.compiler.is_compiling() else len(x)


def length_to_plan(x: Tensor) -> int:
    """For how many positions in a sequence `[B, …, n]` to choose a form."""
    if torch.compiler.is_compiling():
        return 1 if x.dim() == 2 else _COMPILED_LENGTH
    return x.shape[1:-1].numel()


# Where a task's weight is merged with the kept one for its answers: one product in place of three.
MERGES_ON = {"cuda"}
# Numbers of kept weights up to which a network does so: more of them hardly fit beside a task's.
MOST_MERGED = 1 << 29


def dense_is_cheaper(
    positions: int, rank: int, inputs: int, outputs: int, *, kept: bool = False
) -> bool:
    """Whether building W and applying it takes fewer multiplications than applying the factors.

    Only shapes and the task's own rank count: later tasks cannot change which form runs, and with
    it the bits.

    Args:
        kept: whether the factors are added to a kept weight, which then is a part of W and
            otherwise applied besides them.
    """
    dense = rank * inputs * outputs + positions * inputs * outputs
    factored = positions * rank * (inputs + outputs)
    if kept:
        factored += positions * inputs * outputs
    return dense < factored


def merging_is_cheaper(positions: int, inputs: int, outputs: int) -> bool:
    """Whether a step merges a kept weight and the factors, forward and again backward, in place of
    applying the factors beside it. Either way it needs the hidden channels and their gradients;
    how many factors there are counts on both sides. By multiplications it would be twice, but
    merging also moves the weight: steps of MiniLM's size with 512 positions took longer by it on a
    CPU, and those with 2,048 less time."""
    return 3 * inputs * outputs < positions * (inputs + outputs)


MixedWay = Literal["hidden", "factors", "weights"]


class MixedShape(NamedTuple):
    """What decides how a mixed batch runs through a layer."""

    samples: int
    positions: int  # positions in a sample at which the layer applies its matrix
    tasks: int
    rank: int
    inputs: int
    outputs: int
    pointwise: bool  # not a kernel of several taps


class _MixedCost(NamedTuple):
    """What a device computes while it moves one number to or from its memory."""

    multiplications: float
    with_own_kernels: float  # multiplications of a convolution that has a kernel per sample


_MIXED_COST = {"cpu": _MixedCost(12, 12), "cuda": _MixedCost(40, 1)}


def mixed_way(shape: MixedShape, device: str) -> MixedWay:
    """What a row per sample scales: the hidden channels that V gives, U, or all factors, summed to
    a weight per sample. The cheapest of them, measured in numbers moved.

    Only shapes count: the same batch shape takes the same way every time.
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
    """Whether a mixed batch's hidden channels go beside the inputs, for one product with the kept
    weight and U: that moves all inputs once more, and two products all outputs."""
    return device in MERGES_ON and inputs <= outputs


HeadsWay = Literal["gathered", "together", "sorted"]


class HeadsShape(NamedTuple):
    """What decides how a mixed batch runs through the heads."""

    samples: int
    positions: int  # positions in a sample for which there is an answer
    tasks: int
    inputs: int
    widest: int  # classes of the task with the most
    total: int  # classes of all tasks


class _HeadsCost(NamedTuple):
    """What a device computes while it moves one number to or from its memory, and how many it could
    move while it sorts, and while the host launches a product with all heads, not with each."""

    multiplications: float
    sorting: float
    starting: float


_HEADS_COST = {"cpu": _HeadsCost(4, 5 << 18, 0), "cuda": _HeadsCost(20, 1 << 27, 1 << 22)}


def heads_way(shape: HeadsShape, device: str) -> HeadsWay:
    """How a mixed batch finds its heads: a copy of one for each sample, the answers of all heads
    together with each sample's picked from them, or a copy of one for each block of samples sorted
    by task. The cheapest of them, measured in numbers moved.

    Only shapes count: the same batch shape takes the same way every time.
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
    """How many samples of one task make a block: small enough that half-filled blocks, one for
    each task, are few compared to the batch."""
    return max(1, samples // (2 * max(1, tasks)))


def block_count(samples: int, tasks: int, size: int) -> int:
    """How many blocks there can be at most, however the samples spread over the tasks."""
    return (samples + min(samples, tasks) * (size - 1)) // size

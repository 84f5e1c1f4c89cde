"""Which form of a layer runs. Rules of shapes alone, never of timing: the same shapes give the same
bits every time."""

from typing import Literal, NamedTuple


def dense_is_cheaper(positions: int, rank: int, inputs: int, outputs: int) -> bool:
    """Whether building W and applying it takes fewer multiplications than applying the factors.

    A rule of shapes and the task's own rank alone: later tasks cannot change which form runs, and
    with it the bits.
    """
    dense = rank * inputs * outputs + positions * inputs * outputs
    factored = positions * rank * (inputs + outputs)
    return dense < factored


MixedWay = Literal["hidden", "factors", "weights"]


class MixedShape(NamedTuple):
    """What the way of a mixed batch through a layer is chosen by."""

    samples: int
    places: int  # positions in a sample at which the layer applies its matrix
    tasks: int
    rank: int
    inputs: int
    outputs: int
    pointwise: bool  # as no kernel of several taps is


class _Reckoned(NamedTuple):
    """What a device does while it moves one number to or from its memory."""

    multiplications: float
    with_own_kernels: float  # multiplications of a convolution that has a kernel per sample


_RECKONED = {"cpu": _Reckoned(12, 12), "cuda": _Reckoned(40, 1)}


def mixed_way(shape: MixedShape, device: str) -> MixedWay:
    """What a row per sample scales: the hidden channels that V gives, U, or all factors, summed to
    a weight per sample. Whatever takes least, reckoned in numbers moved.

    A rule of shapes alone: the same batch shape takes the same way every time.
    """
    samples, places, tasks, rank, inputs, outputs, pointwise = shape
    at_once, with_own_kernels = _RECKONED.get(device, _RECKONED["cpu"])
    hidden = samples * places * rank
    with_factors = hidden * (inputs + outputs) / at_once
    by_hidden = with_factors + 4 * hidden
    by_factors = with_factors + 2 * hidden + 2 * samples * rank * outputs
    building = min(tasks, samples) * outputs * inputs * (2 + rank / at_once)
    with_weights = (
        samples * places * inputs * outputs / (at_once if pointwise else with_own_kernels)
    )
    by_weights = with_weights + 2 * samples * outputs * inputs + building
    if by_weights < min(by_hidden, by_factors):
        return "weights"
    return "hidden" if by_hidden <= by_factors else "factors"

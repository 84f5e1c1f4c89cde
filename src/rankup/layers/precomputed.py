"""Results that a learner has computed for its layers beforehand, set per thread like the active
task."""

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from rankup.utils.per_thread import PerThread, set_to

PROJECTED = PerThread[tuple[str, Tensor]]()


def projected(layer: str, rows: Tensor) -> AbstractContextManager[None]:
    """Inside, the layer of that name uses `rows [B, R]`, its inputs projected by its frozen factors
    as `project` gives them, in place of projecting its inputs."""
    return set_to(PROJECTED, (layer, rows))


class Built(NamedTuple):
    """A layer's weight for the open task, built on a side stream, and the event to wait for."""

    weight: Tensor
    ready: torch.cuda.Event


BUILT = PerThread[dict[str, Built]]()


def built(weights: dict[str, Built]) -> AbstractContextManager[None]:
    """Inside, layers of these names use these weights for the open task and build none."""
    return set_to(BUILT, weights)

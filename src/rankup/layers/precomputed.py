"""Results that a learner has computed for its layers beforehand. Like the active task, they are a
thread's own."""

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from rankup.utils.per_thread import PerThread, set_to

PROJECTED = PerThread[tuple[str, Tensor]]()


def projected(layer: str, rows: Tensor) -> AbstractContextManager[None]:
    """Inside, the inputs of the layer of that name are already projected by its frozen factors:
    `rows` are what its `project` gave for them."""
    return set_to(PROJECTED, (layer, rows))


class Built(NamedTuple):
    """A layer's weight for the task being learned, and the event to wait for, as it is made on a
    side stream."""

    weight: Tensor
    ready: torch.cuda.Event


BUILT = PerThread[dict[str, Built]]()


def built(weights: dict[str, Built]) -> AbstractContextManager[None]:
    """Inside, layers of these names already have their weights for the task being learned, such as
    those from the `build` of factored convolutions."""
    return set_to(BUILT, weights)

"""What a layer need not compute, because whoever trains it has computed it before. It comes to the
layer as the active task does, through context variables."""

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from rankup.layers.base import set_to

PROJECTED: ContextVar[tuple[str, Tensor] | None] = ContextVar("rankup_projected", default=None)


def projected(layer: str, rows: Tensor) -> AbstractContextManager[None]:
    """Inside, the frozen factors of the layer by that name have seen its inputs already: `rows` are
    what its `project` gave for them."""
    return set_to(PROJECTED, (layer, rows))


class Built(NamedTuple):
    """A layer's weight for the task being learned, and what to wait for, as it was made on a stream
    beside."""

    weight: Tensor
    ready: torch.cuda.Event


BUILT: ContextVar[dict[str, Built] | None] = ContextVar("rankup_built", default=None)


def built(weights: dict[str, Built]) -> AbstractContextManager[None]:
    """Inside, layers by these names have their weights for the task being learned already, as
    factored convolutions have from their `build`."""
    return set_to(BUILT, weights)

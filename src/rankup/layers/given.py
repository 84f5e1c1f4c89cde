"""What a layer need not compute, because whoever trains it has computed it before. It comes to the
layer as the active task does, through context variables."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

PROJECTED: ContextVar[tuple[str, Tensor] | None] = ContextVar("rankup_projected", default=None)


@contextmanager
def projected(layer: str, rows: Tensor) -> Iterator[None]:
    """Inside, the frozen factors of the layer by that name have seen its inputs already: `rows` are
    what its `project` gave for them."""
    token = PROJECTED.set((layer, rows))
    try:
        yield
    finally:
        PROJECTED.reset(token)


BUILT: ContextVar[dict[str, Tensor] | None] = ContextVar("rankup_built", default=None)


@contextmanager
def built(kernels: dict[str, Tensor]) -> Iterator[None]:
    """Inside, layers by these names have their weights for the task being learned already, as
    factored convolutions have from their `build`."""
    token = BUILT.set(kernels)
    try:
        yield
    finally:
        BUILT.reset(token)

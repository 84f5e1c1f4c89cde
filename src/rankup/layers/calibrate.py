"""Statistics of batch norms, pooled over all batches of a task's data: known as precise BN."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rankup.errors import TaskStateError
from rankup.layers.base import Tensors
from rankup.utils.torch_modes import evaluating

if TYPE_CHECKING:
    from rankup.layers.norm import TaskNorm

Run = Callable[[Tensor], object]


@contextmanager
def pooled_statistics(
    body: nn.Module, norms: Sequence[TaskNorm], batches: Iterable[Tensor], run: Run
) -> Iterator[None]:
    """Inside, batch norms hold the statistics of the task being learned, pooled over the batches,
    each of which is run through the body. Without norms no batch is run."""
    if not norms:
        yield
        return
    for norm in norms:
        norm.start_pooling()
    try:
        with evaluating(body):
            seen = 0
            with torch.no_grad():
                for batch in batches:
                    run(batch)
                    seen += 1
            if not seen:
                raise TaskStateError("calibrate yielded no batch to take statistics from")
            yield
    finally:
        for norm in norms:
            norm.pool = None


class Pool:
    """Mean and variance per channel over all batches together, in float64."""

    def __init__(self, channels: int, device: torch.device) -> None:
        self.count = 0
        self.mean = torch.zeros(channels, dtype=torch.float64, device=device)
        self.squares = torch.zeros_like(self.mean)  # summed squared distance from the mean

    def add(self, x: Tensor) -> None:
        over = [dim for dim in range(x.dim()) if dim != 1]
        var, mean = torch.var_mean(x.detach().double(), over, correction=0)
        new = x.numel() // x.shape[1]
        # Pooled as by Chan et al.: no difference of large squares.
        total, apart = self.count + new, mean - self.mean
        self.squares = self.squares + var * new + apart**2 * (self.count * new / total)
        self.mean = self.mean + apart * (new / total)
        self.count = total

    def statistics(self) -> Tensors:
        # A norm that the module never runs has seen nothing; any statistics will do.
        var = self.squares / self.count if self.count else torch.ones_like(self.mean)
        return {"mean": self.mean, "var": var}

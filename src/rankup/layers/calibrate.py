"""Statistics of batch norms, pooled over a task's data (known as precise BN)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rankup.distributed.ranks import Ranks, merged_moments
from rankup.errors import TaskStateError
from rankup.layers.tensors import Tensors
from rankup.utils.torch_modes import evaluating

if TYPE_CHECKING:
    from rankup.layers.norm import TaskNorm

Run = Callable[[Tensor], object]


@contextmanager
def pooled_statistics(
    body: nn.Module,
    norms: Sequence[TaskNorm],
    batches: Iterable[Tensor],
    run: Run,
    ranks: Ranks | None = None,
) -> Iterator[None]:
    """Inside, norms hold statistics of the open task, pooled over batches.

    Args:
        norms: without any, no batch is run.
        batches: of inputs; in a process group each process has its own, and those of all count.
        run: runs the body on a batch.
    """
    if not norms:
        yield
        return
    for norm in norms:
        norm.start_pooling()
    try:
        with evaluating(body):
            if ranks is None:
                count = _run_all(batches, run)
            else:
                count = _run_all_ranks(batches, run, norms, ranks)
            if not count:
                raise TaskStateError("calibrate yielded no batch to take statistics from")
            yield
    finally:
        for norm in norms:
            norm.pool = None


@torch.no_grad()
def _run_all(batches: Iterable[Tensor], run: Run) -> int:
    count = 0
    for batch in batches:
        run(batch)
        count += 1
    return count


def _run_all_ranks(
    batches: Iterable[Tensor], run: Run, norms: Sequence[TaskNorm], ranks: Ranks
) -> int:
    """Run the batches of every process, and pool the statistics of all."""
    count, failure = 0, None
    try:
        count = _run_all(batches, run)
    except Exception as error:
        failure = error  # raised below, because the other processes must not wait for this one
    failed = [rank for rank, why in enumerate(ranks.gathered(failure is not None)) if why]
    if failure is not None:
        raise failure
    if failed:
        raise TaskStateError(f"process {failed[0]} could not run its batches of calibrate")
    pools = [norm.pool for norm in norms if norm.pool is not None]
    mine = [(pool.count, pool.mean.cpu(), pool.squares.cpu()) for pool in pools]
    for pool, *everyone in zip(pools, *ranks.gathered(mine), strict=True):
        pool.count, mean, squares = merged_moments(everyone)
        pool.mean, pool.squares = mean.to(pool.mean), squares.to(pool.squares)
    return sum(ranks.gathered(count))


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
        known = self.count, self.mean, self.squares
        self.count, self.mean, self.squares = merged_moments([known, (new, mean, var * new)])

    def statistics(self) -> Tensors:
        # For a norm that the module never runs, any statistics will do.
        var = self.squares / self.count if self.count else torch.ones_like(self.mean)
        return {"mean": self.mean, "var": var}

"""Gradients of a task, averaged over all ranks at the end of every backward pass.

Torch's DistributedDataParallel only averages the parameters that exist when it is made, but a
network has new ones for every task.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rankup.distributed.ranks import Ranks
from rankup.errors import TaskStateError


def average_gradients(named: Iterable[tuple[str, nn.Parameter]], ranks: Ranks) -> None:
    """Average the gradients of these parameters over all ranks in every later backward pass.

    Raises `TaskStateError` unless all ranks have the same parameters with the same values.
    """
    parameters = dict(named)
    ranks.refuse_different(
        parameters, "grow the same module with the same seed, and begin the same tasks, in each"
    )
    _Averaging(parameters, ranks)


class _Averaging:
    """Waits for the end of a backward pass, then averages all gradients in one message."""

    def __init__(self, parameters: dict[str, nn.Parameter], ranks: Ranks) -> None:
        self.ranks = ranks
        self.parameters = parameters
        self._is_waiting = False
        for parameter in parameters.values():
            parameter.register_post_accumulate_grad_hook(self._wait)  # type: ignore[no-untyped-call]

    def _wait(self, _: Tensor) -> None:
        if not self._is_waiting:
            self._is_waiting = True
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        self._is_waiting = False
        parameters = self.parameters.values()
        rows = [
            p.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in parameters
        ]
        present = [float(p.grad is not None) for p in parameters]
        flat = self.ranks.average_(torch.cat([*rows, rows[0].new_tensor(present)]))
        *means, shares = torch.split(flat, [*map(len, rows), len(rows)])
        for name, parameter, mean, share in zip(
            self.parameters, parameters, means, shares.tolist(), strict=True
        ):
            if abs(share - round(share)) > 0.5 / self.ranks.size:  # only on some ranks
                raise TaskStateError(
                    f"{name} has a gradient in some processes only: all must run the same layers"
                )
            if parameter.grad is not None:
                parameter.grad.copy_(mean.view_as(parameter.grad))

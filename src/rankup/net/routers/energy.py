"""The energy of a task's logits, `log Σ exp` (Liu et al., 2020), centred and scaled by task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from rankup.layers import Tensors
from rankup.net.routers.base import Examples, RoutedBatch, Router

if TYPE_CHECKING:
    from rankup.net.network import IncrementalNet


class Energy(Router):
    name = "energy"

    def learn(self, net: IncrementalNet, task: int, examples: Examples) -> Tensors:
        return {}  # but its centre and scale, which all routers have

    def fits(self, batch: RoutedBatch, task: int, row: Tensors) -> Tensor:
        return batch.of(task).logits.logsumexp(1)

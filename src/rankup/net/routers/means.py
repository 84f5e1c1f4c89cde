"""The distance of inputs to the mean input of each task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rankup.layers import Tensors
from rankup.net.routers.base import Examples, Layouts, RoutedBatch, Router
from rankup.net.routers.features import represented

if TYPE_CHECKING:
    from rankup.net.network import IncrementalNet

# A squared distance sums over many inputs, so one standard deviation more is far less likely than
# for a single number. Without this factor other tasks would get too much probability.
_SHARPENED = 10.0


class Means(Router):
    name = "means"
    runs_tasks = False

    def learn(self, net: IncrementalNet, task: int, examples: Examples) -> Tensors:
        total: Tensor | None = None
        count = 0
        for x, _, options in examples.train():
            rows = represented(net, x, options).flatten(1).double()
            total = rows.sum(0) if total is None else total + rows.sum(0)
            count += len(rows)
        assert total is not None
        return {"mean": (total / count).half()}

    def fits(self, batch: RoutedBatch, task: int, row: Tensors) -> Tensor:
        x = batch.representation().flatten(1)
        if x.shape[1] != len(row["mean"]):  # tasks may have inputs of different sizes
            return x.new_full((len(x),), -math.inf)
        return -(x - row["mean"].to(x)).square().sum(1)

    def votes(self, batch: RoutedBatch, fits: Tensor) -> Tensor:
        return _SHARPENED * fits

    def layouts(self, classes: int) -> Layouts:
        return {"mean": ((torch.float16,), (None,))}

    def check(self, row: Tensors, others: Sequence[Tensors]) -> None:
        """Tasks may have inputs of different sizes."""

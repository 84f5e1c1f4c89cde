"""The distance of inputs to the mean input of each task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rankup.layers import Tensors
from rankup.net.routers.base import Examples, Layouts, Looks, Router
from rankup.net.routers.features import represented

if TYPE_CHECKING:
    from rankup.net.network import IncrementalNet

# A distance adds up over all inputs, so that one deviation more is far less likely. Without this,
# answers of other tasks would have a say where the nearest mean is right.
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

    def fits(self, looks: Looks, task: int, row: Tensors) -> Tensor:
        x = looks.representation().flatten(1)
        if x.shape[1] != len(row["mean"]):  # tasks may have inputs of different sizes
            return x.new_full((len(x),), -math.inf)
        return -(x - row["mean"].to(x)).square().sum(1)

    def votes(self, looks: Looks, fits: Tensor) -> Tensor:
        return _SHARPENED * fits

    def layouts(self, classes: int) -> Layouts:
        return {"mean": ((torch.float16,), (None,))}

    def check(self, row: Tensors, others: Sequence[Tensors]) -> None:
        """Tasks may have inputs of different sizes."""

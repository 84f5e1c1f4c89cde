"""Dense weights of committed tasks: a kept weight merged with a task's factors, so that applying it
takes one product in place of three."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rankup.layers import dispatch
from rankup.layers.base import TaskLayer
from rankup.layers.cached import CACHE
from rankup.layers.tensors import needs_torchs_operations

if TYPE_CHECKING:
    from rankup.layers.factored import FactoredLayer


def allow(layers: Iterable[TaskLayer]) -> None:
    """Let the layers of a network merge weights, if all kept weights together are small enough."""
    factored: list[Any] = [layer for layer in layers if hasattr(layer, "may_merge")]
    kept = (layer.base_weight for layer in factored)
    numbers = sum(weight.numel() for weight in kept if weight is not None)
    for layer in factored:
        layer.may_merge = numbers <= dispatch.MOST_MERGED


def is_on(layer: FactoredLayer, x: Tensor) -> bool:
    """Whether a layer applies merged weights, which is a fixed rule: it does not depend on whether
    they are cached."""
    return (
        layer.may_merge
        and x.device.type in dispatch.MERGES_ON
        and layer.base_weight is not None
        and not needs_torchs_operations()
    )


def weights(layer: FactoredLayer, dtype: torch.dtype, task: int) -> tuple[Tensor, ...]:
    """A committed task's merged weight, `[out, in]`, and its bias if it has one."""

    def make() -> tuple[Tensor, ...]:
        weight = layer._dense([layer.block(task)]).to(dtype)
        return (weight, layer._bias(task).to(dtype)) if layer.spec.bias else (weight,)

    sources = layer.constants()
    # The precision of float32 products on a GPU changes the weight's bits.
    precision = torch.backends.cuda.matmul.fp32_precision if sources[0].is_cuda else None
    return CACHE.of(layer, ("task", task, dtype, precision), sources, make)

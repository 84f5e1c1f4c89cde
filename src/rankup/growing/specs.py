"""Specs from a module's layers and parameters."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from rankup.growing.roles import Form
from rankup.growing.supported import NORMS
from rankup.layers import CONVOLUTIONS, at_least_float32
from rankup.layers.spec import ConvGeometry, FactoredSpec, NormSpec, WeightSpec
from rankup.layers.substitute import STATISTICS
from rankup.rank import LayerRank, Shape


def factored_spec(
    name: str, layer: Any, shape: Shape, rank: LayerRank, feeds_norm: bool, shares: bool
) -> FactoredSpec:
    geometry = None
    if isinstance(layer, CONVOLUTIONS):
        geometry = ConvGeometry(
            layer.in_channels,
            layer.kernel_size,
            layer.stride,
            layer.padding,
            layer.dilation,
            layer.padding_mode,
        )
    has_bias = layer.bias is not None
    return FactoredSpec(
        name,
        shape.outputs,
        shape.inputs,
        has_bias,
        rank,
        feeds_norm,
        geometry,
        shared_bias=has_bias and shares,
    )


def weight_specs(
    name: str, shape: tuple[int, ...], form: Form, rank: LayerRank
) -> Iterable[WeightSpec]:
    """A spec for each matrix of a parameter."""
    matrix, part = form.matrix(shape), form.part_shape(shape)
    size = matrix.outputs, matrix.inputs
    for index in range(form.count):
        stacked = index if form.count > 1 else None
        full = name if stacked is None else f"{name}[{index}]"
        yield WeightSpec(full, *size, False, rank, False, None, part, form.transposed, stacked)


def norm_spec(name: str, layer: Any, shared: bool) -> NormSpec:
    over = next(over for kind, over in NORMS.items() if isinstance(layer, kind))
    shapes = {"layer": "normalized_shape", "rms": "normalized_shape", "group": "num_channels"}
    shape = getattr(layer, shapes.get(over, "num_features"))
    return NormSpec(
        name,
        over,
        shape if isinstance(shape, tuple) else (shape,),
        # `nn.RMSNorm` may take eps from the dtype in which it computes.
        torch.finfo(at_least_float32(layer.weight.dtype)).eps if layer.eps is None else layer.eps,
        getattr(layer, "num_groups", 1),
        layer.weight is not None,
        getattr(layer, "bias", None) is not None,
        shared,
    )


def statistics_spec(name: str, layer: nn.modules.batchnorm._BatchNorm) -> NormSpec:
    """The spec of the running statistics of a batch norm that runs its own forward. Its weight and
    bias have specs of their own."""
    full, shape = f"{name}.{STATISTICS}", (layer.num_features,)
    return NormSpec(full, "batch2d", shape, layer.eps, 1, False, False, False)

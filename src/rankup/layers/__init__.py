"""The layers of a grown network. They know nothing of data, files or the command line."""

from rankup.layers.base import Start, TaskLayer, Tensors, active, refuse_other_dtype
from rankup.layers.factored import (
    FactoredConv2d,
    FactoredLayer,
    FactoredLinear,
    dense_is_cheaper,
)
from rankup.layers.head import TaskHead
from rankup.layers.norm import TaskNorm

__all__ = [
    "FactoredConv2d",
    "FactoredLayer",
    "FactoredLinear",
    "Start",
    "TaskHead",
    "TaskLayer",
    "TaskNorm",
    "Tensors",
    "active",
    "dense_is_cheaper",
    "refuse_other_dtype",
]

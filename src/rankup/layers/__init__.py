"""The layers of a grown network. They know nothing of data, files or the command line."""

from rankup.layers.base import RowsError, Start, TaskLayer, refuse_other_dtype
from rankup.layers.calibrate import pooled_statistics
from rankup.layers.conv import (
    CONVOLUTIONS,
    FactoredConv,
    FactoredConv1d,
    FactoredConv2d,
    FactoredConv3d,
    factored_conv,
)
from rankup.layers.dispatch import dense_is_cheaper
from rankup.layers.factored import FactoredLayer
from rankup.layers.head import TaskHead
from rankup.layers.linear import FactoredLinear
from rankup.layers.norm import TaskNorm
from rankup.layers.tables import Selection
from rankup.layers.task_context import LEARNING, active, active_task
from rankup.layers.tensors import Tensors, at_least_float32, name_of, row_by_row

__all__ = [
    "CONVOLUTIONS",
    "LEARNING",
    "FactoredConv",
    "FactoredConv1d",
    "FactoredConv2d",
    "FactoredConv3d",
    "FactoredLayer",
    "FactoredLinear",
    "RowsError",
    "Selection",
    "Start",
    "TaskHead",
    "TaskLayer",
    "TaskNorm",
    "Tensors",
    "active",
    "active_task",
    "at_least_float32",
    "dense_is_cheaper",
    "factored_conv",
    "name_of",
    "pooled_statistics",
    "refuse_other_dtype",
    "row_by_row",
]

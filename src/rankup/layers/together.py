"""Layers that run for several tasks at once while these are being learned.

A batch holds the samples of A tasks one after another, b of each: `[A·b, …]`. Frozen tensors are
applied to the whole batch. Each task's own tensors are stacked, `[A, …]`, and applied in batched
products, which never sum over samples of different tasks, so a NaN in one task stays there.
"""

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rankup.errors import RankupError
from rankup.layers.base import TaskLayer
from rankup.layers.conv import (
    FactoredConv,
    FactoredConv1d,
    FactoredConv2d,
    FactoredConv3d,
    convolve,
)
from rankup.layers.factored import FactoredLayer
from rankup.layers.head import TaskHead
from rankup.layers.linear import FactoredLinear
from rankup.layers.norm import TaskNorm
from rankup.layers.parameter_layers import TaskTensor
from rankup.layers.stacked_map import StackedMap
from rankup.layers.tensors import Tensors, over_space


class _Stacked(TaskLayer):
    """A layer that runs for A tasks. Its `forward` treats the input as a mixed batch and calls
    `_mixed`, which subclasses override.

    Attributes:
        tasks: A.
        stacked: the tasks' tensors by key, each `[A, …]`.
    """

    tasks: int
    stacked: Tensors

    def hold(self, tasks: int, stacked: Tensors) -> None:
        self.tasks, self.stacked = tasks, stacked

    def lower(self, dtype: torch.dtype) -> None:
        """Cast constant tensors to the dtype of autocast, so that it need not in every step."""
        for key in ("base_weight", "U", "V", "chosen_U", "chosen_V"):
            if (tensor := self._buffers.get(key)) is not None:
                self._buffers[key] = tensor.to(dtype)


class _StackedFactored(_Stacked, FactoredLayer):
    def _split_selector(self) -> tuple[Tensor, Tensor]:
        """The tasks' selectors over frozen factors, `[A, R]`, and over their own, `[A, r]`."""
        selector, old = self.stacked["selector"], len(self.old_U)
        return selector[:, :old], selector[:, old:]


class StackedLinear(_StackedFactored, FactoredLinear):
    def _mixed(self, x: Tensor, tasks: Tensor) -> Tensor:
        stacked = self.stacked
        old, new = self._split_selector()
        grouped = x.to(_dtype_of_activations(x)).reshape(self.tasks, -1, self.in_features)
        rows = [stacked["U"] * new[:, :, None]] if "U" in stacked else []
        if self.spec.bias:  # one more factor, whose hidden channel is always 1
            rows.append(stacked["bias"][:, None])
        U = torch.cat(rows, 1) if rows else new.new_zeros(len(new), 0, self.out_features)
        y: Tensor = StackedMap.apply(grouped, U, stacked.get("V"), self.base_weight)  # type: ignore[no-untyped-call]
        if old.shape[1]:
            hidden = F.linear(grouped, self.old_V)  # [A, n, R]
            y = y + (hidden * old[:, None]) @ self.old_U
        return y.view(*x.shape[:-1], self.out_features)


class _StackedConv(_StackedFactored, FactoredConv):
    def _mixed(self, x: Tensor, tasks: Tensor) -> Tensor:
        stacked = self.stacked
        old, new = self._split_selector()
        each = len(x) // self.tasks
        y = None if self.base_weight is None else self._map(x, self.base_weight)
        if old.shape[1]:
            hidden = self._map(x, self.old_V)
            scale = self._per_sample(old.repeat_interleave(each, 0), x)
            shared = self._up(hidden * scale.to(hidden.dtype), self.old_U)
            y = shared if y is None else y + shared
        if "U" in stacked:
            hidden = self._of_own(x, stacked["V"])  # [A, b, r, …]
            size = hidden.shape[3:]
            hidden = hidden.flatten(3) * new[:, None, :, None].to(hidden.dtype)
            added = torch.matmul(stacked["U"].mT[:, None], hidden)  # [A, b, out, positions]
            added = added.view(len(x), self.out_channels, *size)
            y = added if y is None else y + added
        assert y is not None
        if not self.spec.bias:
            return y
        return y + self._per_sample(stacked["bias"].repeat_interleave(each, 0), x).to(y.dtype)

    def _of_own(self, x: Tensor, V: Tensor) -> Tensor:
        """Hidden channels of each task's own factors, by a convolution with a group per task."""
        kernels = self._kernel(V.reshape(-1, self.spec.inputs))  # [A·r, channels, …]
        y = convolve(_side_by_side(x, self.tasks), kernels, self.conv, groups=self.tasks)
        return y.view(len(y), self.tasks, -1, *y.shape[2:]).transpose(0, 1)  # [A, b, r, …]


class StackedConv1d(_StackedConv, FactoredConv1d): ...


class StackedConv2d(_StackedConv, FactoredConv2d): ...


class StackedConv3d(_StackedConv, FactoredConv3d): ...


class StackedNorm(_Stacked, TaskNorm):
    def _mixed(self, x: Tensor, tasks: Tensor) -> Tensor:
        weight, bias = self.stacked.get("weight"), self.stacked.get("bias")
        if self.spec.is_batch:
            affine = (None if rows is None else rows.flatten() for rows in (weight, bias))
            y = self._normalise(_side_by_side(x, self.tasks), *affine)
            return y.view(-1, self.tasks, *x.shape[1:]).transpose(0, 1).reshape(x.shape)
        dtype = _dtype_of_activations(x)
        with torch.autocast(x.device.type, enabled=False):  # it would answer in full precision
            y = self._normalise(x).to(dtype)
        if weight is None:
            return y
        grouped = y.view(self.tasks, -1, *y.shape[1:])  # [A, b, …]
        weight = self._between(weight, grouped)
        if bias is None:
            return (grouped * weight).view(x.shape)
        return torch.addcmul(self._between(bias, grouped), grouped, weight).view(x.shape)

    def _between(self, rows: Tensor, grouped: Tensor) -> Tensor:
        """A row per task, broadcast over its samples, in the activations' dtype."""
        rows = rows.to(grouped.dtype)
        if not self.spec.is_over_last:
            return over_space(rows[:, None], grouped.dim() - 3)
        between = (1,) * (grouped.dim() - rows.dim())
        return rows.view(len(rows), *between, *rows.shape[1:])


class StackedHead(_Stacked, TaskHead):
    """`stacked["missing"] [A, C]`, if there is one, is True for classes that a task lacks."""

    def hold(self, tasks: int, stacked: Tensors) -> None:
        super().hold(tasks, stacked)
        # The number of logits is read from this table.
        self.rows = self.rows.new_zeros(tasks, stacked["weight"].shape[1])

    def _mixed(self, x: Tensor, tasks: Tensor) -> Tensor:
        weight = self.stacked["weight"]  # [A, C, in]
        grouped = x.reshape(self.tasks, -1, x.shape[-1])
        y = torch.bmm(grouped, weight.mT)  # [A, n, C]
        if "bias" in self.stacked:
            y = y + self.stacked["bias"][:, None].to(y.dtype)
        if "missing" in self.stacked:
            y = y.masked_fill(self.stacked["missing"][:, None], -math.inf)
        return y.view(*x.shape[:-1], weight.shape[1])


class StackedTensor(_Stacked, TaskTensor):
    """A vector that a module with a forward of its own scales or shifts channels by."""

    def of_mixed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self._task(x)  # refuses another number of rows
        own = self.stacked["value"][:, None].to(self._wide)  # [A, 1, …]
        each = len(x) // self.tasks
        rows = own.expand(-1, each, *own.shape[2:]).reshape(len(x), *own.shape[2:])
        return rows, self.constant()


_FORMS: dict[type[TaskLayer], type[_Stacked]] = {
    FactoredLinear: StackedLinear,
    FactoredConv1d: StackedConv1d,
    FactoredConv2d: StackedConv2d,
    FactoredConv3d: StackedConv3d,
    TaskNorm: StackedNorm,
    TaskHead: StackedHead,
    TaskTensor: StackedTensor,
}


def stacked_form(layer: TaskLayer) -> _Stacked:
    """A copy of a layer that shares all its constant tensors, to `hold` several tasks of the same
    kind as the layer's open task."""
    if (form := _FORMS.get(type(layer))) is None:
        raise RankupError(
            f"layer {layer.spec.name!r} cannot learn several tasks at once: learn them one after "
            "another, with fit"
        )
    stand_in: Any = copy.copy(layer)
    for key in ("_parameters", "_buffers", "_modules"):
        vars(stand_in)[key] = dict(vars(layer)[key])
    stand_in._parameters.clear()
    stand_in.__class__ = form
    return stand_in  # type: ignore[no-any-return]


def _dtype_of_activations(x: Tensor) -> torch.dtype:
    autocast = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
    return torch.get_autocast_dtype(x.device.type) if autocast else x.dtype


def _side_by_side(x: Tensor, tasks: int) -> Tensor:
    """Reshape `[A·b, channels, …]` to `[b, A·channels, …]`."""
    grouped = x.reshape(tasks, -1, *x.shape[1:]).transpose(0, 1)
    return grouped.reshape(len(x) // tasks, tasks * x.shape[1], *x.shape[2:])

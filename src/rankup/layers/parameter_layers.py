"""Layers that give a tensor in place of a parameter, for modules that run their own forward."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rankup.errors import TaskStateError
from rankup.layers.base import Start, TaskLayer
from rankup.layers.factored import FactoredLayer
from rankup.layers.mixed_call import GatheringLayer, MixedTables
from rankup.layers.spec import TensorSpec, WeightSpec
from rankup.layers.tables import Selection, aligned_rows, without_row
from rankup.layers.task_context import active_task
from rankup.layers.tensors import Tensors, at_least_float32, row_by_row


class FactoredWeight(FactoredLayer):
    """A parameter that is a sum of factors, `W_t = W₀ + Σ_i s_{i,t} · u_i v_iᵀ`, or one of the
    matrices that are stacked in it. The sum is a matrix with a row for each output."""

    spec: WeightSpec

    def forward(self) -> Tensor:
        return self.tensor(_one_task(self))

    def tensor(self, task: int) -> Tensor:
        """The task's matrix in the shape and order that its module reads."""
        matrix = self.matrix(task)
        return (matrix.t() if self.spec.transposed else matrix).reshape(self.spec.shape)

    def base_of(self, tensor: Tensor) -> Tensors:
        """The kept weight, `[out, in]`, from the module's own tensor."""
        outputs, inputs = self.spec.outputs, self.spec.inputs
        if self.spec.transposed:
            return {"weight": tensor.reshape(inputs, outputs).t()}
        return {"weight": tensor.reshape(outputs, inputs)}


class TaskTensor(GatheringLayer):
    """A parameter of which every task has its own, such as a bias or a norm's weight.

    Its table is `values [T, …]`. Tasks start from `base_value`.
    """

    spec: TensorSpec
    values: Tensor
    base_value: Tensor

    def __init__(
        self, spec: TensorSpec, seed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(spec, seed, dtype, device)
        self.register_buffer("values", torch.empty(0, *spec.shape, **self._factory))
        self.register_buffer("base_value", torch.zeros(spec.shape, **self._factory))
        self.neutral = 0.0  # by which the module scales or shifts without effect
        self._wide = at_least_float32(self.dtype)

    def forward(self) -> Tensor:
        task = _one_task(self)
        if self._knows(task):
            return aligned_rows(self.values, task, task + 1)[0].to(self.computes_in)
        return self.get_parameter("new_value").to(self.computes_in)

    def start(self, classes: int, start: Start) -> Tensors:
        last = start.previous(self.count) if start.norms == "previous" else None
        return {"value": (self.base_value if last is None else self.values[last]).clone()}

    def extended(self, *added: Tensors, selections: Sequence[Selection] = (None,)) -> Tensors:
        return {"values": torch.cat([self.values, *(tensors["value"][None] for tensors in added)])}

    def without(self, task: int) -> Tensors:
        return {"values": without_row(self.values, task)}

    def added(self, task: int) -> Tensors:
        return {"value": self.values[task]}

    def tensor(self, task: int) -> Tensor:
        return self.values[task].to(self.computes_in)

    def of_mixed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """For a mixed batch `x`: each sample's vector, `[B, 1, …]`, and the neutral vector."""
        tasks = self._task(x)
        assert isinstance(tasks, Tensor)
        (rows,), (neutral,) = self._gathered(tasks, self._wide)
        return rows, neutral

    def mixed_sources(self) -> tuple[Tensor, ...]:
        return (self.values,)

    def mixed_tables(self, dtype: torch.dtype) -> MixedTables:
        values = self.values.view(-1, self.base_value.numel()).to(dtype)
        return MixedTables((values,), (self.constant(),))

    def constant(self) -> Tensor:
        """The neutral vector, by which a module scales or shifts without effect."""
        return torch.full_like(self.base_value, self.neutral, dtype=self.computes_in)

    def extra_repr(self) -> str:
        return f"shape={list(self.spec.shape)}, per task"

    def base(self) -> Tensors:
        return {"value": self.base_value} if self.spec.kept else {}

    def start_from(self, value: Tensor) -> None:
        self.base_value = row_by_row(value.detach(), **self._factory)


def _one_task(layer: TaskLayer) -> int:
    """The active task, which must be a single one that the layer knows or learns."""
    task = active_task()
    if not isinstance(task, int):
        raise TaskStateError(
            f"{layer.spec.name!r} is each task's own and can be read only while the network runs "
            "for a single task"
        )
    if not (layer._knows(task) or layer._learns(task)):
        raise TaskStateError(f"{layer.spec.name!r} knows tasks 0 to {layer.count - 1}, not {task}")
    return task

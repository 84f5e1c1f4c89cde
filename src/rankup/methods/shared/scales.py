"""The base of methods whose tasks learn vectors that scale random matrices. The matrices come from
the seed, are frozen and are not stored."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rankup.growing.plan import Plan
from rankup.layers import Selection, Start, Tensors
from rankup.layers.spec import FactoredSpec, Shapes
from rankup.methods.shared.layout import Layout, Layouts
from rankup.methods.shared.weights import TaskWeight, TaskWeightMethod


class ScalesMethod(TaskWeightMethod):
    """A network of `ScaledWeight` layers. Each task stores its scales, biases, head and norms."""


class ScaledWeight(TaskWeight):
    """A weight that is computed from two frozen matrices A and B and a task's vectors of scales.

    Scales start at one and biases at zero. Scales of zero, as the papers use on top of a pretrained
    weight, would make a layer without one compute nothing, so that it never learned. The matrices
    are scaled so that the weight then has the variance of Kaiming et al.

    Args:
        scales: the shapes of the vectors of scales, by name.

    Attributes:
        vectors: the shapes of all vectors of a task, including its bias.
        all_NAME: `[T, …]`, the vectors of this name of learned tasks.
    """

    A: Tensor
    B: Tensor

    reads = ("A", "B")

    def __init__(self, spec: FactoredSpec, plan: Plan, seed: int, scales: Shapes) -> None:
        super().__init__(spec, seed, plan.dtype, plan.device)
        self.vectors = scales | ({"bias": (spec.outputs,)} if spec.bias else {})
        for key, shape in self.vectors.items():
            self.register_buffer(f"all_{key}", torch.empty(0, *shape, **self._factory))

    def freeze(self, name: str, matrix: Tensor, variance: float) -> None:
        """Register a matrix whose entries are uniform from −1 to 1, scaled to this variance."""
        sized = (matrix * math.sqrt(3 * variance)).to(**self._factory).contiguous()
        self.register_buffer(name, sized, persistent=False)

    @property
    def kaiming(self) -> float:
        """The variance for entries of the weight: 2/in, or 1/in before a batch norm, where there is
        no ReLU to compensate for."""
        return (1 if self.spec.before_batch_norm else 2) / self.spec.inputs

    def vector(self, key: str, task: int) -> Tensor:
        """A vector of a learned or open task."""
        if task < self.count:
            return self.get_buffer(f"all_{key}")[task]
        new: Tensor = getattr(self, f"new_{key}")  # under vmap it is no `nn.Parameter`
        return new

    def bias(self, task: int) -> Tensor | None:
        return self.vector("bias", task) if self.spec.bias else None

    def start(self, classes: int, start: Start) -> Tensors:
        return {
            key: torch.full(shape, float(key != "bias"), **self._factory)
            for key, shape in self.vectors.items()
        }

    def extended(self, *added: Tensors, selections: Sequence[Selection] = (None,)) -> Tensors:
        return {
            f"all_{key}": torch.cat(
                [self.get_buffer(f"all_{key}"), torch.stack([task[key] for task in added])]
            )
            for key in self.vectors
        }

    def added(self, task: int) -> Tensors:
        return {key: self.vector(key, task) for key in self.vectors}

    def layouts(self, is_last: bool) -> Layouts:
        return {key: Layout(shape, self.dtype) for key, shape in self.vectors.items()}

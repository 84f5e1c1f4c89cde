"""Shared by methods whose tasks learn scales of random matrices, and nothing else of a weight. The
matrices come from the seed, never learn and are never stored."""

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

    def kept_layouts(self, learned: int) -> Layouts:
        return {}


class ScaledWeight(TaskWeight):
    """`W_t` made of two frozen matrices and the task's vectors of scales.

    Scales start at one and biases at zero: there is no pretrained weight that a layer could start
    from, and where scales start at zero the layer would compute nothing and never learn. Matrices
    are of a size that gives W Kaiming's variance then.

    Tables: `all_KEY [T, …]` for each vector.
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
        """Keep a matrix of numbers from −1 to 1, scaled to entries of this variance."""
        sized = (matrix * math.sqrt(3 * variance)).to(**self._factory).contiguous()
        self.register_buffer(name, sized, persistent=False)

    @property
    def kaiming(self) -> float:
        """The variance that W should have; before a batch norm there is no ReLU to make up for."""
        return (1 if self.spec.before_batch_norm else 2) / self.spec.inputs

    def vector(self, key: str, task: int) -> Tensor:
        """A vector of a learned or open task."""
        if task < self.count:
            return self.get_buffer(f"all_{key}")[task]
        new: Tensor = getattr(self, f"new_{key}")  # no parameter where seeds are mapped over
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

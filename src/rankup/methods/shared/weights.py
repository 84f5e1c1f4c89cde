"""The base of methods in which every task has its own weights, computed from the few numbers that
are stored of it. Nothing that a learned task depends on ever changes."""

from abc import abstractmethod
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from rankup.errors import RankupError
from rankup.growing.plan import Plan
from rankup.layers import TaskLayer
from rankup.layers.conv import convolve
from rankup.layers.spec import FactoredSpec, LayerSpec
from rankup.methods.base import Setting
from rankup.methods.shared.dense import DenseMethod
from rankup.methods.shared.layout import Layouts
from rankup.training.batches import Feed
from rankup.training.engine.module import ModuleLearner


class TaskWeight(TaskLayer):
    """A Linear or a convolution with a weight for each task.

    Attributes:
        reads: the names of the buffers that steps of an open task read.
    """

    spec: FactoredSpec

    reads: ClassVar[tuple[str, ...]]

    @abstractmethod
    def weight(self, task: int) -> Tensor:
        """The weight of a learned or open task, as a matrix `[out, in]`."""

    def bias(self, task: int) -> Tensor | None:
        """The bias `[out]` of a learned or open task; by default there is none."""
        return None

    def layouts(self, is_last: bool) -> Layouts | None:
        """The layouts of the tensors that a task stores; None if they are not known.

        Args:
            is_last: whether it is the task that was learned last.
        """
        return None

    def forward(self, x: Tensor) -> Tensor:
        task = self._task(x)
        assert isinstance(task, int)
        return self._map(x, self.weight(task), self.bias(task))

    def _map(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        conv = self.spec.conv
        if conv is None:
            return F.linear(x, weight, bias)
        return convolve(x, weight.view(-1, conv.channels, *conv.kernel_size), conv, bias)


class WeightLearner(ModuleLearner):
    """Learns the open task of a module with `TaskWeight` layers."""

    def __init__(self, body: nn.Module, feed: Feed, index: int) -> None:
        super().__init__(body, feed, index)
        self._step_inputs |= {
            f"body.{name}.{key}": layer.get_buffer(key)
            for name, layer in body.named_modules()
            if isinstance(layer, TaskWeight)
            for key in layer.reads
        }


class TaskWeightMethod(DenseMethod):
    """A network of `TaskWeight` layers. Each task also has its own head and norms."""

    norms = "per task"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        if left := [name for name, _ in self.body.named_parameters()]:
            raise RankupError(
                "all weights must be in Linear, convolution or norm layers, so that tasks share "
                f"none: {', '.join(left)} would be shared"
            )

    @abstractmethod
    def layer(self, spec: FactoredSpec, plan: Plan) -> TaskWeight:
        """The layer that replaces a Linear or a convolution."""

    def kept_layouts(self, learned: int) -> Layouts:
        return {}

    def learner(self, feed: Feed) -> WeightLearner:
        return WeightLearner(self.body, feed, self.learned)

    def layer_layouts(self, layer: TaskLayer, task: int, learned: int) -> Layouts | None:
        if isinstance(layer, TaskWeight):
            return layer.layouts(is_last=task == learned - 1)
        return super().layer_layouts(layer, task, learned)

    def _task_layer(self, spec: LayerSpec, plan: Plan) -> TaskLayer | None:
        if isinstance(spec, FactoredSpec):
            return self.layer(spec, plan)
        return super()._task_layer(spec, plan)

"""VeRA (Kopiczko, Blankevoort and Asano, ICLR 2024) from scratch: two random matrices for all
layers and tasks, and for each layer and task two vectors of scales."""

import torch
from torch import Tensor

from rankup import seeds
from rankup.growing.plan import Plan
from rankup.layers.spec import FactoredSpec
from rankup.methods.options import VeraOptions
from rankup.methods.shared.layout import Layouts
from rankup.methods.shared.scales import ScaledWeight
from rankup.methods.shared.weights import TaskWeight, TaskWeightMethod


class Vera(TaskWeightMethod):
    """Random matrices come from the seed and are never stored. Each task stores its scales, biases,
    head and norms."""

    def layer(self, spec: FactoredSpec, plan: Plan) -> TaskWeight:
        count = self.setting.options_of(VeraOptions).directions
        return VeraWeight(spec, count, self.seed, plan.dtype, plan.device)

    def kept_layouts(self, learned: int) -> Layouts:
        return {}


class VeraWeight(ScaledWeight):
    """`W_t = diag(b_t) B diag(d_t) A`, with the first rows of B `[out, R]` and the first columns of
    A `[R, in]` that all layers share."""

    A: Tensor
    B: Tensor

    reads = ("A", "B")

    def __init__(
        self,
        spec: FactoredSpec,
        count: int,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(spec, seed, dtype, device, {"b": (spec.outputs,), "d": (count,)})
        self.freeze("A", seeds.uniform(seed, "vera", "A", spec.inputs, count).t(), self.kaiming)
        self.freeze("B", seeds.uniform(seed, "vera", "B", spec.outputs, count), 1 / count)

    def weight(self, task: int) -> Tensor:
        b, d = self.vector("b", task), self.vector("d", task)
        return (b[:, None] * self.B * d) @ self.A  # [out, in]

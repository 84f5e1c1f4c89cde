"""VeRA (Kopiczko, Blankevoort and Asano, ICLR 2024) from scratch: two random matrices for all
layers and tasks, and for each layer and task two vectors of scales."""

from torch import Tensor

from rankup import seeds
from rankup.growing.plan import Plan
from rankup.layers.spec import FactoredSpec
from rankup.methods.options import VeraOptions
from rankup.methods.shared.scales import ScaledWeight, ScalesMethod
from rankup.methods.shared.weights import TaskWeight


class Vera(ScalesMethod):
    def layer(self, spec: FactoredSpec, plan: Plan) -> TaskWeight:
        return VeraWeight(spec, plan, self.seed, self.setting.options_of(VeraOptions).directions)


class VeraWeight(ScaledWeight):
    """`W_t = diag(b_t) B diag(d_t) A`, with the first rows of B `[out, R]` and the first columns of
    A `[R, in]` that all layers share."""

    def __init__(self, spec: FactoredSpec, plan: Plan, seed: int, count: int) -> None:
        super().__init__(spec, plan, seed, {"b": (spec.outputs,), "d": (count,)})
        self.freeze("A", seeds.uniform(seed, "vera", "A", spec.inputs, count).t(), self.kaiming)
        self.freeze("B", seeds.uniform(seed, "vera", "B", spec.outputs, count), 1 / count)

    def weight(self, task: int) -> Tensor:
        b, d = self.vector("b", task), self.vector("d", task)
        return (b[:, None] * self.B * d) @ self.A  # [out, in]

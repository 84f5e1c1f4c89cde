"""VeRA (Kopiczko, Blankevoort and Asano, *VeRA: Vector-based Random Matrix Adaptation*, ICLR 2024),
here without a pretrained weight: all layers and tasks share two random matrices A and B, and a task
learns only two vectors of scales for each layer,

    W_t = diag(b_t) B diag(d_t) A.
"""

from torch import Tensor

from rankup import seeds
from rankup.growing.plan import Plan
from rankup.layers.spec import FactoredSpec
from rankup.methods.options import VeraOptions
from rankup.methods.shared.scales import ScaledWeight, ScalesMethod
from rankup.methods.shared.weights import TaskWeight


class Vera(ScalesMethod):
    """A network of `VeraWeight` layers."""

    def layer(self, spec: FactoredSpec, plan: Plan) -> TaskWeight:
        return VeraWeight(spec, plan, self.seed, self.setting.options_of(VeraOptions).directions)


class VeraWeight(ScaledWeight):
    """`W_t = diag(b_t) B diag(d_t) A`. A and B are parts of matrices that all layers share: their
    first columns and rows, respectively.

    Attributes:
        A: `[R, in]`.
        B: `[out, R]`.
    """

    def __init__(self, spec: FactoredSpec, plan: Plan, seed: int, count: int) -> None:
        super().__init__(spec, plan, seed, {"b": (spec.outputs,), "d": (count,)})
        self.freeze("A", seeds.uniform(seed, "vera", "A", spec.inputs, count).t(), self.kaiming)
        self.freeze("B", seeds.uniform(seed, "vera", "B", spec.outputs, count), 1 / count)

    def weight(self, task: int) -> Tensor:
        b, d = self.vector("b", task), self.vector("d", task)
        return (b[:, None] * self.B * d) @ self.A  # [out, in]

"""RandLoRA (Albert et al., *RandLoRA: Full-rank parameter-efficient fine-tuning of large models*,
ICLR 2025), here without a pretrained weight: the weight is a sum of enough random matrices of low
rank to have full rank, and a task learns only the scales λ and γ of these,

    W_t = Σ_j B_j diag(λ_{t,j}) A diag(γ_{t,j}).
"""

import math

import torch
from torch import Tensor

from rankup import seeds
from rankup.growing.plan import Plan
from rankup.layers.spec import FactoredSpec, Shapes
from rankup.methods.options import RandLoraOptions
from rankup.methods.shared.scales import ScaledWeight, ScalesMethod
from rankup.methods.shared.weights import TaskWeight


class RandLora(ScalesMethod):
    """A network of `BlocksWeight` layers."""

    def layer(self, spec: FactoredSpec, plan: Plan) -> TaskWeight:
        return BlocksWeight(
            spec, plan, self.seed, self.setting.options_of(RandLoraOptions).block_rank
        )


class BlocksWeight(ScaledWeight):
    """`W_t = Σ_j B_j diag(λ_{t,j}) A diag(γ_{t,j})` over n = ⌈min(in, out) / r⌉ blocks of rank r.

    For layers with fewer outputs than inputs the sum is transposed. A and B_j are parts of matrices
    that all layers share: their first columns and rows, respectively.

    Attributes:
        A: `[r, short]`, where short is the smaller of the layer's two sizes.
        B: `[long, n·r]`, all B_j side by side.
    """

    def __init__(self, spec: FactoredSpec, plan: Plan, seed: int, rank: int) -> None:
        short, long = sorted((spec.inputs, spec.outputs))
        blocks = math.ceil(short / rank)
        scales: Shapes = {"lambdas": (blocks, rank), "gammas": (blocks, short)}
        super().__init__(spec, plan, seed, scales)
        B = [seeds.uniform(seed, "randlora", f"B{j}", long, rank) for j in range(blocks)]
        self.freeze("A", seeds.uniform(seed, "randlora", "A", short, rank).t(), self.kaiming)
        self.freeze("B", torch.cat(B, 1), 1 / (blocks * rank))

    def weight(self, task: int) -> Tensor:
        lambdas, gammas = self.vector("lambdas", task), self.vector("gammas", task)
        scaled = lambdas[:, :, None] * self.A * gammas[:, None, :]  # [n, r, short]
        blocks = scaled.flatten(0, 1)  # [n·r, short]
        if self.spec.outputs < self.spec.inputs:
            return blocks.t() @ self.B.t()
        return self.B @ blocks  # [out, in]

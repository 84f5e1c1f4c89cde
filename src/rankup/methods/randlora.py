"""RandLoRA (Albert et al., ICLR 2025) from scratch: a sum of random matrices of low rank, as many
as full rank takes, and for each layer and task the scales of all of them."""

import math

import torch
from torch import Tensor

from rankup import seeds
from rankup.growing.plan import Plan
from rankup.layers.spec import FactoredSpec, Shapes
from rankup.methods.options import RandLoraOptions
from rankup.methods.shared.layout import Layouts
from rankup.methods.shared.scales import ScaledWeight
from rankup.methods.shared.weights import TaskWeight, TaskWeightMethod


class RandLora(TaskWeightMethod):
    """Random matrices come from the seed and are never stored. Each task stores its scales, biases,
    head and norms."""

    def layer(self, spec: FactoredSpec, plan: Plan) -> TaskWeight:
        rank = self.setting.options_of(RandLoraOptions).block_rank
        return BlocksWeight(spec, rank, self.seed, plan.dtype, plan.device)

    def kept_layouts(self, learned: int) -> Layouts:
        return {}


class BlocksWeight(ScaledWeight):
    """`W_t = Σ_j B_j diag(λ_{t,j}) A diag(γ_{t,j})` over n = ⌈min(in, out) / r⌉ blocks of rank r.

    A `[r, short]` and B_j `[long, r]` are for a layer with at least as many outputs as inputs; for
    others the sum is transposed. All layers share the first columns of A and the first rows of B_j,
    of which `B [long, n·r]` has all side by side.
    """

    A: Tensor
    B: Tensor

    reads = ("A", "B")

    def __init__(
        self,
        spec: FactoredSpec,
        rank: int,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        short, long = sorted((spec.inputs, spec.outputs))
        blocks = math.ceil(short / rank)
        scales: Shapes = {"lambdas": (blocks, rank), "gammas": (blocks, short)}
        super().__init__(spec, seed, dtype, device, scales)
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

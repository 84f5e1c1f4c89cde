"""SupSup, supermasks in superposition (Wortsman et al., NeurIPS 2020): a random network that never
learns, and for each task a binary mask of its weights,

    W_t = W ⊙ m_t.

Masks are found by edge-popup (Ramanujan et al., CVPR 2020): every weight has a score, the largest
scores of a layer make the mask, and gradients pass straight through to all scores.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from rankup import seeds
from rankup.growing.plan import Plan
from rankup.layers import Selection, Start, Tensors
from rankup.layers.spec import FactoredSpec
from rankup.methods.options import SupSupOptions
from rankup.methods.shared.bits import pack, packed_size, stray_bits, unpack
from rankup.methods.shared.layout import Layout, Layouts
from rankup.methods.shared.weights import TaskWeight, TaskWeightMethod


class SupSup(TaskWeightMethod):
    """Weights come from the seed and are not stored, and only heads have biases. Each task stores a
    bit per weight, its head and its norms."""

    def layer(self, spec: FactoredSpec, plan: Plan) -> TaskWeight:
        share = self.setting.options_of(SupSupOptions).share
        return MaskedWeight(spec, share, self.seed, plan.dtype, plan.device)


class MaskedWeight(TaskWeight):
    """`W_t = W ⊙ m_t`, where all entries of W have the same size and signs drawn from the seed.

    Attributes:
        random: `[out, in]`, W.
        masks: `[T, bytes]`, the masks of learned tasks, a bit per weight.
        kept: how many weights a mask keeps.
    """

    random: Tensor
    masks: Tensor
    new_scores: Tensor

    reads = ("random",)

    def __init__(
        self,
        spec: FactoredSpec,
        share: float,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(spec, seed, dtype, device)
        self.shape = (spec.outputs, spec.inputs)
        self.kept = max(1, round(share * math.prod(self.shape)))
        # The standard deviation of Kaiming et al. for as many inputs as a mask keeps.
        signs = seeds.signs(seed, spec.name, "W", *self.shape, dtype)  # ±1/√inputs
        random = (signs * math.sqrt(2 / share)).to(device)
        self.register_buffer("random", random, persistent=False)
        size = packed_size(random.numel())
        self.register_buffer("masks", torch.empty(0, size, dtype=torch.uint8, device=device))

    def weight(self, task: int) -> Tensor:
        if task < self.count:
            return self.random * self.mask(task)
        # The second term is zero; it is the straight-through gradient to all scores.
        scores = self.new_scores
        masked = self.random * largest(scores.detach(), self.kept)
        return masked + self.random * (scores - scores.detach())

    def mask(self, task: int) -> Tensor:
        """`[out, in]`: which weights a learned task uses."""
        return unpack(self.masks[task], 1, self.random.numel()).bool().view(self.shape)

    def start(self, classes: int, start: Start) -> Tensors:
        scores = torch.empty(self.shape, dtype=torch.float32)
        nn.init.kaiming_uniform_(scores, math.sqrt(5), generator=self._draw("scores"))
        return {"scores": scores.to(**self._factory)}

    def learned(self) -> Tensors:
        return {"mask": pack(largest(self.new_scores.detach(), self.kept).byte(), 1)}

    def extended(self, *added: Tensors, selections: Sequence[Selection] = (None,)) -> Tensors:
        return {"masks": torch.cat([self.masks, torch.stack([task["mask"] for task in added])])}

    def added(self, task: int) -> Tensors:
        return {"mask": self.masks[task]}

    def layouts(self, is_last: bool) -> Layouts:
        count = self.random.numel()
        wrong = partial(stray_bits, count=count)
        return {"mask": Layout((packed_size(count),), torch.uint8, wrong=wrong)}


def largest(scores: Tensor, count: int) -> Tensor:
    """A mask of the `count` largest scores and of all that are equal to the least of these:
    breaking ties would take longer than everything else.

    >>> largest(torch.tensor([[1.0, 3.0], [2.0, 1.0]]), 2)
    tensor([[False,  True],
            [ True, False]])
    """
    return scores >= torch.topk(scores.flatten(), count, sorted=False).values.amin()

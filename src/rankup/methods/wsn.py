"""WSN, winning subnetworks (Kang et al., *Forget-free Continual Learning with Winning Subnetworks*,
ICML 2022): all tasks share weights, of which each uses a subset,

    W_t = W ⊙ m_t.

A task learns the weights that no earlier task uses and a score for every weight; its mask m_t has
the largest scores of each layer. Weights that a learned task uses are frozen, but later tasks may
use them, too.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rankup import seeds
from rankup.layers import Tensors
from rankup.methods.base import Setting
from rankup.methods.options import WsnOptions
from rankup.methods.shared.bits import pack, packed_size, stray_bits, unpack
from rankup.methods.shared.guard import GuardedLearner, SubnetMethod, buffer_name
from rankup.methods.shared.layout import Layout, Layouts
from rankup.training.batches import Feed
from rankup.training.engine.learner import Learner


class WSN(SubnetMethod):
    """Scores count by their absolute value. They are drawn anew for every task and not stored; a
    mask takes a bit per weight. Norms are per task, and so are biases, which the authors do
    without.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.share = setting.options_of(WsnOptions).share
        for name, weight in self.weights.items():
            none = weight.new_empty(0, packed_size(weight.numel()), dtype=torch.uint8)
            self.kept[_masks(name)] = none
        self._learner: WsnLearner  # of the open task

    def learner(self, feed: Feed) -> Learner:
        self.take_last_biases()
        used = {name: self.used(name) for name in self.weights}
        self._learner = WsnLearner(self, feed, self.constant() | used)
        return self._learner

    def mask(self, name: str, task: int) -> Tensor:
        """Which entries of a weight a learned task uses."""
        weight = self.weights[name]
        return unpack(self.kept[_masks(name)][task], 1, weight.numel()).bool().view_as(weight)

    def used(self, name: str) -> Tensor:
        """Which entries of a weight any learned task uses."""
        used = torch.zeros_like(self.weights[name], dtype=torch.bool)
        for task in range(self.learned):
            used |= self.mask(name, task)
        return used

    def weights_of(self, task: int) -> Tensors:
        masks = {
            name: self.mask(name, task) if task < self.learned else self._learner.mask(name)
            for name in self.weights
        }
        return {name: torch.where(masks[name], w, 0) for name, w in self.weights.items()}

    def consolidate(self, feed: Feed) -> None:
        for name in self.weights:
            bits = pack(self._learner.mask(name).int(), 1)
            self.kept[_masks(name)] = torch.cat([self.kept[_masks(name)], bits[None]])
        super().consolidate(feed)

    def kept_layouts(self, learned: int) -> Layouts:
        layouts = super().kept_layouts(learned)
        for name, weight in self.weights.items():
            wrong = partial(stray_bits, count=weight.numel())
            shape = learned, packed_size(weight.numel())
            layouts[f"kept/{_masks(name)}"] = Layout(shape, torch.uint8, wrong=wrong)
        return layouts


class WsnLearner(GuardedLearner):
    """Learns the weights that are free, together with the scores that determine the masks."""

    def __init__(self, method: WSN, feed: Feed, frozen: Tensors) -> None:
        super().__init__(method.body, feed, method.learned, frozen)
        self.share, self.names = method.share, list(method.weights)
        for name, weight in method.weights.items():
            drawn = torch.empty(weight.shape, dtype=torch.float32)
            draw = seeds.generator(method.seed, "wsn", name, method.learned)
            nn.init.kaiming_uniform_(drawn, math.sqrt(5), generator=draw)
            self.register_parameter(buffer_name("scores", name), nn.Parameter(drawn.to(weight)))

    def scores(self, name: str) -> nn.Parameter:
        return self.get_parameter(buffer_name("scores", name))

    def mask(self, name: str) -> Tensor:
        """Which entries of a weight the open task uses."""
        sizes = self.scores(name).detach().abs()
        return largest(sizes, max(1, round(self.share * sizes.numel())))

    def learned(self) -> Tensors:
        scores = {buffer_name("scores", name): self.scores(name) for name in self.names}
        return {**scores, **super().learned()}

    def adopt(self, learned: Tensors) -> None:
        super().adopt(learned)
        for name in self.names:
            self.scores(name).data = learned[buffer_name("scores", name)].detach()

    def answer(self, x: Tensor) -> Tensor:
        masked = {name: self._masked(name) for name in self.names}
        answer: Tensor = functional_call(self.body, masked, (x,))
        return answer

    def _masked(self, name: str) -> Tensor:
        weight, sizes = self.body.get_parameter(name), self.scores(name).abs()
        # The second term is zero; it is the straight-through gradient to all scores.
        return weight * self.mask(name) + weight.detach() * (sizes - sizes.detach())


def largest(sizes: Tensor, count: int) -> Tensor:
    """A mask of exactly `count` entries, the largest ones.

    >>> largest(torch.tensor([[1.0, 3.0], [2.0, 3.0]]), 2)
    tensor([[False,  True],
            [False,  True]])
    """
    chosen = sizes.flatten().topk(count, sorted=False).indices
    none = torch.zeros_like(sizes, dtype=torch.bool)
    return none.flatten().index_fill(0, chosen, True).view_as(sizes)


def _masks(name: str) -> str:
    return f"{name}.masks"

"""Elastic weight consolidation: what old tasks rest on is held where they left it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from rankup import seeds
from rankup.feed import Draws, Feed
from rankup.layers import Tensors, active
from rankup.learner import ModuleLearner
from rankup.methods.base import Setting
from rankup.methods.dense import DenseMethod
from rankup.methods.options import EwcOptions
from rankup.modes import evaluating
from rankup.steps import Learner

_BYTES = 2**26  # that the gradients of samples may take which are computed at once
_TIMES_ON_GPU = 16  # as much, because it waits for Python unless they are many


class EWC(DenseMethod):
    """Kirkpatrick et al. (2017): every task but the first is learned with the penalty
    strength/2 · Σ importance · (θ − anchor)² over all that tasks share.

    The importance is the diagonal of the Fisher information, summed over tasks. The anchor is where
    the latest task left the weights, as in the online form of Schwarz et al. (2018), or each task
    pulls towards its own. These anchors need not be told apart: Σₜ Fₜ (θ − θₜ)² is, but for a
    constant, Σₜ Fₜ times the squared distance from their mean weighted by Fₜ.

    Stored are the weights, the heads and an importance for each shared weight. The latest anchor is
    the weights as they are between tasks; only the mean of all anchors is stored beside them.

    Norms are shared as torch keeps them: their weights are held like all others, their running
    statistics are not. Without strength this is `finetune`, bit for bit.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        assert isinstance(setting.options, EwcOptions)
        self.options = setting.options

    def learner(self, feed: Feed) -> Learner:
        if not self.learned:
            return super().learner(feed)
        weights = self._weights()
        anchor = self.kept.get("anchor", flat(weights.values()))
        return HeldLearner(
            self.body,
            feed,
            self.learned,
            list(weights),
            self.options.strength * self.kept["importance"],
            anchor,
        )

    def consolidate(self, feed: Feed) -> None:
        weights, added = flat(self._weights().values()), self.importance(feed)
        old = self.options.gamma * self.kept.get("importance", torch.zeros_like(added))
        kept = {"importance": old + added}
        if self.options.anchors == "all":
            # What no task needs is not held, wherever its anchor is.
            share = (added / kept["importance"]).nan_to_num()
            kept["anchor"] = torch.lerp(self.kept.get("anchor", weights), weights, share)
        self.kept = kept

    @torch.no_grad()  # that `grad` sees through; heads, which it knows nothing of, need none
    def importance(self, feed: Feed) -> Tensor:
        """The mean over samples of squared gradients of the log-likelihood, each sample with a
        label that is drawn from the network's own answer for it, as the Fisher information asks
        for. In eval mode: norms neither mix samples nor learn statistics."""
        weights, index = self._weights(), self.learned

        def surprise(weights: Tensors, x: Tensor, label: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(self.body, weights, (x[None],)), label[None])

        gradients = vmap(grad(surprise), in_dims=(None, 0, 0))
        rows = seeds.generator(self.seed, "importance", index)
        labels = seeds.generator(self.seed, "importance labels", index, device=self.device)
        squares = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        room = _BYTES * (_TIMES_ON_GPU if self.device.type == "cuda" else 1)
        at_once = max(1, room // sum(4 * weight.numel() for weight in weights.values()))
        seen = 0
        for x in feed.sample(self.options.samples, rows):
            answers = self.predict(x, index).softmax(1)
            drawn = torch.multinomial(answers, 1, generator=labels).squeeze(1)
            with evaluating(self.body), active(index):
                for part in zip(*(torch.split(t, at_once) for t in (x, drawn)), strict=True):
                    for name, own in gradients(weights, *part).items():
                        squares[name] += own.square().sum(0)
            seen += len(x)
        return flat(squares.values()) / seen

    def _weights(self) -> Tensors:
        """The parameters that all tasks share."""
        shared = self._shared().items()
        return {name: t.detach() for name, t in shared if isinstance(t, nn.Parameter)}


class HeldLearner(ModuleLearner):
    """A module whose parameters `names` are held to an anchor by springs of given stiffness."""

    stiffness: Tensor
    anchor: Tensor

    def __init__(
        self,
        body: nn.Module,
        feed: Feed,
        index: int,
        names: Sequence[str],
        stiffness: Tensor,
        anchor: Tensor,
    ) -> None:
        super().__init__(body, feed, index)
        self.names = names
        self.look_at("stiffness", stiffness)
        self.look_at("anchor", anchor)

    def forward(self, draw: Draws) -> Tensor:
        # Not by get_parameter: under vmap they are no parameters.
        now = dict(self.body.named_parameters())
        moved = flat(now[name] for name in self.names) - self.anchor
        return super().forward(draw) + (self.stiffness * moved.square()).sum() / 2


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All numbers of some tensors, one after another."""
    return torch.cat([tensor.flatten() for tensor in tensors])

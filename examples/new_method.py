"""Synaptic Intelligence (Zenke, Poole and Ganguli, ICML 2017), as a method in a file of its own.

RANKUP_METHODS=examples/new_method.py rankup run --method si --stream s-digits --strength 30
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rankup.methods import (
    DenseMethod,
    Draws,
    Feed,
    ModuleLearner,
    Options,
    Setting,
    axis,
    option,
    register,
)


@dataclass(frozen=True)
class SIOptions(Options):
    strength: float = option(10.0, "Weight of the method's own term of the loss.", least=0)
    damping: float = option(0.1, "Added to the squared distance that a weight moved.", above=0)


@register(
    "si",
    help="holds weights by how much their movement lowered the loss",
    options=SIOptions,
    search=[axis("lr", 3e-4, 1e-3, 3e-3), axis("strength", 1.0, 10.0, 30.0, 100.0)],
)
class SynapticIntelligence(DenseMethod):
    """Every task but the first is learned with the penalty strength · Σ Ω (θ − θ̃)², where θ̃ is
    where the task before left the weights.

    While a task is learned, each weight's part in lowering its loss is summed up: the path integral
    ω of gradient times movement. Its importance then is Ω = Σ ω / (Δ² + damping) over all tasks,
    with Δ the weight's movement during the task, and never negative, as in the authors' code.

    An importance for each weight that tasks share is stored; θ̃ is the weights themselves.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.options = setting.options_of(SIOptions)

    def learner(self, feed: Feed) -> "SILearner":
        self._learner = SILearner(self, feed)
        return self._learner

    def weights(self) -> Tensor:
        return flat(self.shared_parameters().values())

    def importance(self) -> Tensor:
        return self.kept.get("importance", torch.zeros_like(self.weights()))

    def consolidate(self, feed: Feed) -> None:
        moved = self.weights() - self._learner.anchor
        added = self._learner.path / (moved.square() + self.options.damping)
        self.kept = {"importance": (self.importance() + added).relu()}


class SILearner(ModuleLearner):
    """Steps on a task's loss and the penalty, which sum up the path integral of the task's loss."""

    anchor: Tensor
    stiffness: Tensor
    path: Tensor

    def __init__(self, method: SynapticIntelligence, feed: Feed) -> None:
        super().__init__(method.body, feed, method.learned)
        self.names = [f"body.{name}" for name in method.shared_parameters()]
        # What a step reads is registered; what it also changes is listed in `mutated`, so that
        # checkpoints hold it and captured graphs hand it back.
        self.register_input("anchor", method.weights())
        self.register_input("stiffness", 2 * method.options.strength * method.importance())
        self.register_input("path", torch.zeros_like(self.anchor))
        self.mutated += ("path",)

    def gradient(self, draw: Draws) -> tuple[Tensor, Sequence[Tensor]]:
        loss, grads = super().gradient(draw)
        slopes = dict(zip(self.learned(), grads, strict=True))
        self._before, self._slope = self.weights(), flat(slopes[name] for name in self.names)
        moved = self._before - self.anchor
        pull = self.stiffness * moved  # the gradient of the penalty
        sizes = [slopes[name].numel() for name in self.names]
        for name, part in zip(self.names, pull.split(sizes), strict=True):
            slopes[name] = slopes[name] + part.view_as(slopes[name])
        return loss + (pull * moved).sum() / 2, list(slopes.values())

    @torch.no_grad()
    def after_step(self) -> None:
        self.path -= self._slope * (self.weights() - self._before)

    def weights(self) -> Tensor:
        return flat(self.get_parameter(name).detach() for name in self.names)


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All values of some tensors in one vector."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])

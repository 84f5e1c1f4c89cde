"""A-GEM, averaged gradient episodic memory (Chaudhry et al., *Efficient Lifelong Learning with
A-GEM*, ICLR 2019): no step may increase the loss of a batch from a memory of earlier tasks.

The gradient g is projected wherever it points against the gradient r of the memory batch:

    g − (⟨g, r⟩ / ⟨r, r⟩) · r   if ⟨g, r⟩ < 0
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rankup.errors import RankupError
from rankup.methods.base import Setting
from rankup.methods.shared.replay import ReplayLearner, ReplayMethod
from rankup.training.batches import Draws


def projected(grads: Sequence[Tensor], reference: Sequence[Tensor]) -> list[Tensor]:
    """The nearest gradient that does not point against the reference: its component along the
    reference is removed where their inner product is negative; otherwise it is unchanged.

    >>> projected([torch.tensor([-1.0, 2.0])], [torch.tensor([2.0, 0.0])])
    [tensor([0., 2.])]
    """
    along, square = _inner(grads, reference), _inner(reference, reference)
    # With a zero reference the share is NaN, but then nothing is harmful.
    harmful, share = along < 0, along / square
    return [
        torch.where(harmful, grad - share * other, grad)
        for grad, other in zip(grads, reference, strict=True)
    ]


def _inner(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    # Summed in float64, so that only rounding error remains along the reference.
    products = [(a * b).sum(dtype=torch.float64) for a, b in zip(one, other, strict=True)]
    return torch.stack(products).sum()


class AGEMLearner(ReplayLearner):
    """Projects the gradient of each step by that of a batch from the memory."""

    def gradient(self, draw: Draws) -> tuple[Tensor, Sequence[Tensor]]:
        loss, grads = super().gradient(draw)
        if not self.held:
            return loss, grads
        remembered = self.loss(self.replayed(draw))
        return loss, projected(grads, self.gradients_of(remembered))


class AGEM(ReplayMethod):
    """Gradients are projected over all weights and heads together. The memory holds random samples
    of each class. Norms are shared; batch norms also see the memory batches.
    """

    learner_class = AGEMLearner

    @classmethod
    def check(cls, setting: Setting) -> None:
        super().check(setting)
        if setting.recipe.optimiser != "sgd":
            raise RankupError(
                "agem projects the gradient, so it needs the optimiser that follows the gradient, "
                f"sgd, not {setting.recipe.optimiser}"
            )
        if setting.recipe.weight_decay:
            raise RankupError(
                "agem takes no step against its memory, but a weight decay moves weights whatever "
                f"the memory says: set it to 0, not {setting.recipe.weight_decay:g}"
            )

"""A-GEM, averaged gradient episodic memory (Chaudhry et al., ICLR 2019)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rankup.errors import RankupError
from rankup.feed import Draws
from rankup.methods.base import Setting
from rankup.methods.replay import ReplayLearner, ReplayMethod


def projected(grads: Sequence[Tensor], reference: Sequence[Tensor]) -> list[Tensor]:
    """The nearest gradient that does not point against the reference: without its part along the
    reference where their inner product is negative, else as it is.

    >>> projected([torch.tensor([-1.0, 2.0])], [torch.tensor([2.0, 0.0])])
    [tensor([0., 2.])]
    """
    along, square = _inner(grads, reference), _inner(reference, reference)
    # With a reference of zero the share is no number, but nothing is harmful then.
    harmful, share = along < 0, along / square
    return [
        torch.where(harmful, own - share * other, own)
        for own, other in zip(grads, reference, strict=True)
    ]


def _inner(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    # Summed in float64: what is left along the reference is then no more than rounding.
    products = [(a * b).sum(dtype=torch.float64) for a, b in zip(one, other, strict=True)]
    return torch.stack(products).sum()


class AGEMLearner(ReplayLearner):
    def gradient(self, draw: Draws) -> tuple[Tensor, Sequence[Tensor]]:
        loss, grads = super().gradient(draw)
        if not self.held:
            return loss, grads
        remembered = self.loss(self.replayed(draw))
        return loss, projected(grads, self.by_leaves(remembered))


class AGEM(ReplayMethod):
    """No step goes against the gradient, by all weights and heads, of a batch of the memory.

    The memory holds samples of each class drawn at random. Norms are shared; batch norms also see
    the batches of the memory.
    """

    learner_class = AGEMLearner

    @classmethod
    def check(cls, setting: Setting) -> None:
        super().check(setting)
        if setting.recipe.optimiser != "sgd":
            raise RankupError(
                f"agem projects the gradient and needs the optimiser that follows it, sgd, not "
                f"{setting.recipe.optimiser}"
            )

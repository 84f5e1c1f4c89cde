"""Learning from the answers of a network that knows a task already, in place of labels: knowledge
distillation (Hinton et al., 2015), by a teacher that sees the same images as the learner
(Beyer et al., 2022)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rankup.errors import RankupError
from rankup.growing.copying import copy_of
from rankup.growing.supported import uninitialised
from rankup.training.batches import Feed
from rankup.training.evaluate import check_answer, is_guessing, share_right
from rankup.training.memory_format import takes_channels_last

_LOOK = 2048  # training samples that a teacher must answer before anything learns from it


class Teacher(nn.Module):
    """Answers for one task, as steps take them: without gradients, and in evaluation mode.

    Args:
        module: what answers. It is copied, not modified.
    """

    def __init__(self, module: nn.Module, feed: Feed) -> None:
        super().__init__()
        _refuse_if_unusable(module)
        self.module = copy_of(module)
        self.module.eval()
        for parameter in self.module.parameters():  # not all modules do that themselves
            parameter.requires_grad_(False)
        self.module.to(feed.device, feed.dtype)
        self._refuse_if_ignorant(feed)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.module(x if takes_channels_last(self.module, x) else x.contiguous())
        return logits

    def train(self, mode: bool = True) -> Teacher:
        return self  # learning from it does not change it

    def _refuse_if_ignorant(self, feed: Feed) -> None:
        """It may have learned another stream, or the same one with another seed."""
        x, _ = next(feed.train(2))
        try:
            answer = self(x)
        except RankupError:
            raise
        except Exception as error:  # from the module's own code
            raise RankupError(
                f"the teacher cannot answer inputs of shape {list(x.shape)}: {error}"
            ) from error
        check_answer(answer, x, feed.task, "fit needs a teacher that")
        right, guess = share_right(self, feed.train(_LOOK)), feed.guess()
        if is_guessing(right, guess, min(len(feed), _LOOK)):
            raise RankupError(
                f"the teacher knows nothing about task {feed.task.name!r}: it is right for "
                f"{right:.1%} of its training data, no better than guessing ({guess:.1%}); it must "
                "have learned the same tasks, from the same seed"
            )


def _refuse_if_unusable(module: nn.Module) -> None:
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise RankupError(
            "the teacher was compiled with torch.jit: pass the module that it was made from"
        )
    if uninitialised(module):
        raise RankupError("the teacher is not initialised yet: run it once on an input")


def distance(logits: Tensor, wanted: Tensor, softness: float) -> Tensor:
    """How far answers are from a teacher's: the divergence of both after a softmax of logits
    divided by `softness`. With a higher one it also matters how unlikely a teacher thinks each
    wrong class is. Gradients have the same size with any.

    >>> logits = torch.tensor([[2.0, 0.0]])
    >>> distance(logits, logits, 4.0), distance(logits, -logits, 1.0)
    (tensor(0.), tensor(1.5232))
    """
    own, other = ((answers / softness).log_softmax(1) for answers in (logits, wanted))
    return softness**2 * (other.exp() * (other - own)).sum(1).mean()

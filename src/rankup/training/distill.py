"""Knowledge distillation (Hinton et al., 2015): a task is learned from a teacher's answers in place
of labels. The teacher sees the same augmented images as the learner (Beyer et al., 2022)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rankup.errors import RankupError
from rankup.growing.copying import copy_of
from rankup.growing.supported import uninitialised
from rankup.training.batches import Feed
from rankup.training.evaluate import check_logits, fraction_correct, is_guessing
from rankup.training.memory_format import takes_channels_last

_CHECKED = 2048  # training samples that a teacher must answer better than by guessing


class Teacher(nn.Module):
    """A frozen copy of a module in evaluation mode, whose answers a task is learned from."""

    def __init__(self, module: nn.Module, feed: Feed) -> None:
        super().__init__()
        if uninitialised(module):
            raise RankupError("the teacher is not initialised yet: run it once on an input")
        self.module = copy_of(module).to(feed.device, feed.dtype)
        self.module.eval()  # not chained: a module's own may return nothing
        for parameter in self.module.parameters():
            parameter.requires_grad_(False)
        self._check(feed)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.module(x if takes_channels_last(self.module, x) else x.contiguous())
        return logits

    def train(self, mode: bool = True) -> Teacher:
        return self  # always in evaluation mode

    def _check(self, feed: Feed) -> None:
        """Raise if the module cannot answer the task's inputs, or is no better than guessing: it
        may have learned another stream, or the same one with another seed."""
        x, _ = next(feed.train(2))
        try:
            answer = self(x)
        except RankupError:
            raise
        except Exception as error:  # from the module's own code
            raise RankupError(
                f"the teacher cannot answer inputs of shape {list(x.shape)}: {error}"
            ) from error
        check_logits(answer, x, feed.task, "fit needs a teacher that")
        accuracy, guess = fraction_correct(self, feed.train(_CHECKED)), feed.guess()
        if is_guessing(accuracy, guess, min(len(feed), _CHECKED)):
            raise RankupError(
                f"the teacher knows nothing about task {feed.task.name!r}: it is right for "
                f"{accuracy:.1%} of its training data, no better than guessing ({guess:.1%}); it "
                "must have learned the same tasks, from the same seed"
            )


def divergence(logits: Tensor, teacher_logits: Tensor, softness: float) -> Tensor:
    """The mean Kullback-Leibler divergence from the teacher's answers, each a softmax of logits
    divided by `softness`. It is multiplied by `softness²`, so that the size of gradients does not
    depend on the softness.

    >>> logits = torch.tensor([[2.0, 0.0]])
    >>> divergence(logits, logits, 4.0), divergence(logits, -logits, 1.0)
    (tensor(0.), tensor(1.5232))
    """
    logs, teacher_logs = ((t / softness).log_softmax(1) for t in (logits, teacher_logits))
    return softness**2 * (teacher_logs.exp() * (teacher_logs - logs)).sum(1).mean()

"""Answers to questions that name no task: the network guesses it."""

from typing import NamedTuple

import torch
from torch import Tensor

from rankup.inference.answering import refuse_nan
from rankup.inference.served import Served, TaskCard
from rankup.net.guess import guess_and_answer


class Guessed(NamedTuple):
    """The likeliest task of an input.

    Attributes:
        probability: of the task, given that it is one of those known.
        none: the share of the task's held-out samples that fit it better than the input.
        classes: the probability of each class, given the task.
    """

    card: TaskCard
    probability: float
    none: float
    classes: list[float]


class Guesser:
    """The network behind the queue of questions without a task, and what is made of its answers.

    A task that is saved while a batch runs is not among those guessed until the next one.
    """

    def __init__(self, served: Served) -> None:
        self.served = served
        self._cards: list[TaskCard] = []

    def __call__(self, x: Tensor, task: object) -> Tensor:
        """`[B, 1 + ΣC]`: `none`, then the log-probability of each class of each task."""
        now = self.served.now
        self._cards = list(now.tasks.values())
        found, untold = guess_and_answer(now.net, x)
        return torch.cat([found.none[:, None], untold.logits], 1)

    def finish(self, rows: Tensor) -> list[Guessed]:
        counts = [card.classes for card in self._cards]
        known = rows[:, 1 : 1 + sum(counts)].softmax(1)
        refuse_nan(known)
        by_task = torch.split(known, counts, 1)  # T of [B, C]
        shares = torch.stack([each.sum(1) for each in by_task], 1)  # [B, T]
        found = []
        for row, task in enumerate(shares.argmax(1).tolist()):
            probability = shares[row, task]
            classes = (by_task[task][row] / probability).tolist()
            none = float(rows[row, 0])
            found.append(Guessed(self._cards[task], float(probability), none, classes))
        return found

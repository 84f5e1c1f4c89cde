"""Checks of a network's answers: how many are right, whether they are logits at all, and whether
they beat guessing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rankup.errors import RankupError

if TYPE_CHECKING:
    from rankup.data.tasks import Task


def share_right(
    predict: Callable[[Tensor], Tensor], chunks: Iterator[tuple[Tensor, Tensor]]
) -> float:
    """The share of samples whose largest logit is their label's."""
    right: Tensor | int = 0
    seen = 0
    with torch.no_grad():
        for x, y in chunks:
            right = right + (predict(x).argmax(1) == y).sum()
            seen += len(y)
    return int(right) / seen


def check_answer(answer: object, x: Tensor, task: Task, who: str, way_out: str = "") -> None:
    """Refuse an answer that is not a logit for each sample and class."""
    wanted = [len(x), task.classes]
    given = list(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
    if given != wanted:
        raise RankupError(
            f"{who} returns a tensor of logits, {wanted} for {len(x)} samples and the "
            f"{task.classes} classes of task {task.name!r}, got {given}{way_out}"
        )


def is_guessing(reached: float, guess: float, samples: int) -> bool:
    """Whether an accuracy is at most three standard errors above guessing.

    >>> is_guessing(0.55, 0.5, samples=100), is_guessing(0.55, 0.5, samples=10_000)
    (True, False)
    """
    error = math.sqrt(guess * (1 - guess) / samples)
    # A handful of samples cannot be three errors away, but all of them can be right.
    return reached <= guess + 3 * error and reached < 1

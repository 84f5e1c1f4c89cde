"""Testing methods without telling them which task a sample is of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rankup.methods.base import Method
from rankup.training.batches import Feed

if TYPE_CHECKING:
    from rankup.data.tasks import Task

_BATCH = 500  # samples that are answered for all tasks at once


def is_domain_incremental(tasks: Sequence[Task]) -> bool:
    """Whether all tasks transform the inputs of the same classes, so that a class is right whatever
    its task."""
    return all(task.transform is not None for task in tasks)


def test_untold(method: Method, feeds: Sequence[Feed], pools: bool) -> dict[str, list[float]]:
    """The accuracy among the classes of all tasks, and the share of samples whose task is guessed,
    under the keys "accuracy" and "tasks": a number for each task.

    Args:
        method: a method that has learned these tasks.
        feeds: the data of the tasks.
        pools: whether tasks have the same classes, whose probabilities are added over tasks.
    """
    starts = [0]
    for feed in feeds:
        starts.append(starts[-1] + feed.task.classes)
    accuracy, tasks = [], []
    for number, feed in enumerate(feeds):
        right, found, count = 0, 0, 0
        for x, y in feed.test():
            for part, labels in zip(*(torch.split(t, _BATCH) for t in (x, y)), strict=True):
                answer = method.untold(part)
                chosen = _classes(answer.logits, feed.task.classes, pools)
                wanted = labels if pools else labels + starts[number]
                right += int((chosen == wanted).sum())
                found += int((answer.task == number).sum())
            count += len(y)
        accuracy.append(right / count)
        tasks.append(found / count)
    return {"accuracy": accuracy, "tasks": tasks}


def _classes(logits: Tensor, classes: int, pools: bool) -> Tensor:
    """`[B]`: the likeliest class. With `pools`, probabilities are first added over tasks."""
    if pools:
        logits = torch.logsumexp(logits.view(len(logits), -1, classes), 1)
    return logits.argmax(1)

"""How right a method is without being told which task a sample is of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rankup.methods.base import Method
from rankup.training.batches import Feed

if TYPE_CHECKING:
    from rankup.data.tasks import Task

_TOGETHER = 500  # samples that are asked about all tasks at once


def is_domain_incremental(tasks: Sequence[Task]) -> bool:
    """Whether tasks change the inputs of the same classes: then the class alone must be right."""
    return all(task.transform is not None for task in tasks)


def test_untold(method: Method, feeds: Sequence[Feed], pools: bool) -> dict[str, list[float]]:
    """For each task the share of its test samples that are right among the classes of all tasks,
    and of those whose task is right.

    Args:
        pools: whether tasks have the same classes, so that any task's class of that number counts.
    """
    starts = [0]
    for feed in feeds:
        starts.append(starts[-1] + feed.task.classes)
    accuracy, tasks = [], []
    for number, feed in enumerate(feeds):
        right, found, count = 0, 0, 0
        for x, y in feed.test():
            for part, labels in zip(*(torch.split(t, _TOGETHER) for t in (x, y)), strict=True):
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
    """`[B]`: the likeliest class; if tasks have the same classes, after adding up over tasks."""
    if pools:
        logits = torch.logsumexp(logits.view(len(logits), -1, classes), 1)
    return logits.argmax(1)

"""Accuracy of answers, and checks that they are logits and better than guessing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rankup.errors import RankupError

if TYPE_CHECKING:
    from rankup.data.tasks import Task
    from rankup.training.batches import Feed
    from rankup.training.loop import Pupil

_CHECKED = 2_000  # training samples that decide whether a task was learned


def fraction_correct(
    predict: Callable[[Tensor], Tensor], batches: Iterable[tuple[Tensor, Tensor]]
) -> float:
    """The fraction of samples whose largest logit is their label's."""
    correct: Tensor | int = 0
    samples = 0
    with torch.no_grad():
        for x, y in batches:
            correct = correct + (predict(x).argmax(1) == y).sum()
            samples += len(y)
    return int(correct) / samples


def check_logits(answer: object, x: Tensor, task: Task, needed_by: str, hint: str = "") -> None:
    """Raise unless an answer is a tensor with a logit for each sample and class."""
    wanted = [len(x), task.classes]
    shape = list(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
    if shape != wanted:
        raise RankupError(
            f"{needed_by} returns a tensor of logits, {wanted} for {len(x)} samples and the "
            f"{task.classes} classes of task {task.name!r}, got {shape}{hint}"
        )


def is_guessing(accuracy: float, guess: float, samples: int) -> bool:
    """Whether an accuracy is at most three standard errors above guessing.

    >>> is_guessing(0.55, 0.5, samples=100), is_guessing(0.55, 0.5, samples=10_000)
    (True, False)
    """
    error = math.sqrt(guess * (1 - guess) / samples)
    # With a handful of samples, three errors above guessing may be above 1.
    return accuracy <= guess + 3 * error and accuracy < 1


def training_accuracy(pupil: Pupil, feed: Feed, samples: int) -> float:
    """A pupil's accuracy on its open task, on at most this many training samples."""
    per_task = max(1, samples // len(feed.parts))
    accuracies = [
        fraction_correct(lambda x, index=index: pupil.predict(x, index), part.train(per_task))  # type: ignore[misc]
        for index, part in enumerate(feed.parts, pupil.learned)
    ]
    return sum(accuracies) / len(accuracies)


def why_not_learned(pupil: Pupil, feed: Feed) -> str | None:
    """A message if a pupil's open task ends no better than guessing on its own training data."""
    accuracy, guess = training_accuracy(pupil, feed, _CHECKED), feed.guess()
    if not is_guessing(accuracy, guess, min(len(feed), _CHECKED)):
        return None
    if _beats_class_frequencies(pupil, feed):
        return None
    return (
        f"task {feed.task.name!r} was not learned: {accuracy:.1%} on its own training data is "
        f"not three standard errors above guessing ({guess:.1%}); another learning rate or "
        "more epochs may help"
    )


def _beats_class_frequencies(pupil: Pupil, feed: Feed) -> bool:
    """Whether the log-likelihood beats the class frequencies by three standard errors. Where one
    class dominates, this can hold although almost every sample is answered with that class."""
    per_task = max(1, _CHECKED // len(feed.parts))
    gains = []
    with torch.no_grad():
        for index, part in enumerate(feed.parts, pupil.learned):
            counts = part.task.train_y.bincount(minlength=part.task.classes)
            frequencies = counts.double() / len(part)
            for x, y in part.train(per_task):
                logs = pupil.predict(x, index).double().log_softmax(1)
                gains.append(logs.gather(1, y[:, None]).squeeze(1) - frequencies.log()[y])
    gain = torch.cat(gains)
    return len(gain) > 1 and bool(gain.mean() > 3 * gain.std() / math.sqrt(len(gain)))

"""Learning one task, with one network or with several at once: the epochs, and what to do when it
fails."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from rankup import seeds
from rankup.checkpoint import Checkpoint, Learning
from rankup.engine import Engine
from rankup.errors import RankupError
from rankup.feed import Feed
from rankup.optimiser import rates
from rankup.recipe import Recipe
from rankup.steps import Learner, Steps

if TYPE_CHECKING:
    from rankup.data.tasks import Task

_PROBE = 1000  # training samples behind the accuracy that progress shows
_WITNESS = 2_000  # training samples behind the verdict that a task was learned


class TaskFailed(RankupError):
    """A task could not be learned; the network is as it was before."""


@dataclass(frozen=True)
class Epoch:
    """How far a task is, after each pass over its data."""

    number: int  # epochs done
    epochs: int
    loss: float
    look: Callable[[], float]

    def accuracy(self) -> float:
        """The accuracy on a sample of the training data; computed when asked for."""
        return self.look()


OnEpoch = Callable[[Epoch, Checkpoint], None]


class Pupil(Protocol):
    """Whoever learns tasks: a network, or a method with one."""

    @property
    def recipe(self) -> Recipe: ...

    @property
    def seed(self) -> int: ...

    @property
    def learned(self) -> int:
        """How many tasks it has learned."""

    def begin(self, task: Task) -> Learner:
        """Open a task, or raise and be as before."""

    def predict(self, x: Tensor, task: int) -> Tensor:
        """Logits of a task that was learned or is open."""

    def end(self) -> None:
        """Make what was learned of the open task a part of what is known."""

    def abandon(self) -> None:
        """Drop the open task, if there is one."""


def learn(
    pupils: Sequence[Pupil],
    tasks: Sequence[Task],
    engine: Engine,
    resume: Sequence[Checkpoint | None] | None = None,
    on_epoch: Sequence[OnEpoch | None] | None = None,
) -> list[TaskFailed | None]:
    """Let every pupil learn its next task: at once those that take as many steps, and then others.

    Gives back for each why it failed, if it did; then it is as it was before. So are all whose task
    is still open when something else goes wrong, as with Ctrl-C.
    """
    learners: list[Learner] = []
    failures: list[TaskFailed | None] = [None] * len(pupils)
    points, tell = resume or [None] * len(pupils), on_epoch or [None] * len(pupils)
    try:
        for pupil, task in zip(pupils, tasks, strict=True):
            learners.append(pupil.begin(task))
        for group in _as_long(pupils, learners):
            steps = engine.start([learners[n] for n in group])
            found = _train(
                [pupils[n] for n in group],
                steps,
                [points[n] for n in group],
                [tell[n] for n in group],
            )
            for number, failure in zip(group, found, strict=True):
                failures[number] = failure
        for number, (pupil, learner) in enumerate(zip(pupils, learners, strict=True)):
            failures[number] = failures[number] or _verdict(pupil, learner.feed)
            if failures[number] is None:
                pupil.end()
        return failures
    finally:
        for pupil in pupils[: len(learners)]:
            pupil.abandon()


def _as_long(pupils: Sequence[Pupil], learners: Sequence[Learner]) -> list[list[int]]:
    """Which of them take the same number of epochs and steps, by their places."""
    groups: dict[tuple[int, int], list[int]] = {}
    for number, (pupil, learner) in enumerate(zip(pupils, learners, strict=True)):
        groups.setdefault((pupil.recipe.epochs, learner.feed.steps), []).append(number)
    return list(groups.values())


def _train(
    pupils: Sequence[Pupil],
    steps: Steps,
    resume: Sequence[Checkpoint | None],
    on_epoch: Sequence[OnEpoch | None],
) -> list[TaskFailed | None]:
    """All epochs of pupils that take as many steps. Whatever is random in an epoch comes from the
    seed, the task's index and the epoch's number, so an interrupted run goes on from a checkpoint
    as if nothing had happened."""
    epochs, index = pupils[0].recipe.epochs, pupils[0].learned
    feeds = [learner.feed for learner in steps.learners]
    first = _resumed(pupils, steps, resume)
    length = feeds[0].steps
    peaks = [p.recipe.first_lr if index == 0 and p.recipe.first_lr else p.recipe.lr for p in pupils]
    steps_in_all = epochs * length
    planned = [rates(p.recipe, peak, steps_in_all) for p, peak in zip(pupils, peaks, strict=True)]
    failures: list[TaskFailed | None] = [None] * len(pupils)
    for epoch in range(first, epochs):
        draws = [
            learner.draws(seeds.of_epoch(pupil.seed, index, epoch, feed.device))
            for pupil, learner, feed in zip(pupils, steps.learners, feeds, strict=True)
        ]
        own = seeds.number(pupils[0].seed, "module", index, epoch)
        steps.turn(epoch)
        now = slice(epoch * length, (epoch + 1) * length)
        totals = steps.epoch(draws, [each[now] for each in planned], own)
        for number, total in enumerate(totals.tolist()):
            if not math.isfinite(total):
                failures[number] = failures[number] or TaskFailed(
                    f"task {feeds[number].task.name!r} diverged: the loss of epoch {epoch + 1} is "
                    f"{total / length}; a learning rate below {peaks[number]:g} may help"
                )
            elif (tell := on_epoch[number]) is not None:
                look = _look(pupils[number], steps, feeds[number])
                done = Epoch(epoch + 1, epochs, total / length, look)
                _tell(tell, done, steps, number, _learning(pupils[number], feeds[number]))
        if all(failures):
            break
    steps.keep()
    return failures


def _learning(pupil: Pupil, feed: Feed) -> Learning:
    return Learning(feed.task.name, pupil.seed, pupil.recipe)


def _tell(tell: OnEpoch, done: Epoch, steps: Steps, number: int, of: Learning) -> None:
    checkpoint = Checkpoint(done.number, lambda: steps.state(number), of)
    kept = weakref.ref(checkpoint)
    try:
        tell(done, checkpoint)
    finally:
        del checkpoint
        if (held := kept()) is not None:
            # Somebody goes on holding it, maybe without having looked into it: copied now, before
            # another step changes it.
            _ = held.state


def _resumed(pupils: Sequence[Pupil], steps: Steps, resume: Sequence[Checkpoint | None]) -> int:
    """The epoch to go on from. Replicas that stopped in different epochs begin the task again."""
    if len({point.epoch if point else 0 for point in resume}) > 1:
        return 0
    for number, point in enumerate(resume):
        if point is not None:
            here = _learning(pupils[number], steps.learners[number].feed)
            point.refuse_other(here, steps.state(number))
            steps.resume(number, point.state)
    return resume[0].epoch if resume[0] else 0


def _look(pupil: Pupil, steps: Steps, feed: Feed) -> Callable[[], float]:
    def look() -> float:
        steps.keep()
        return _reached(pupil, feed, _PROBE)

    return look


def _reached(pupil: Pupil, feed: Feed, most: int) -> float:
    """The accuracy of what is being learned on so many of its training samples."""
    each = max(1, most // len(feed.parts))
    found = [
        share_right(lambda x, task=task: pupil.predict(x, task), part.train(each))  # type: ignore[misc]
        for task, part in enumerate(feed.parts, pupil.learned)
    ]
    return sum(found) / len(found)


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
            f"{who} answers with a tensor of logits, {wanted} for {len(x)} samples of the "
            f"{task.classes} classes of task {task.name!r}, got {given}{way_out}"
        )


def is_guessing(reached: float, guess: float, samples: int) -> bool:
    """Whether an accuracy on so many samples is not three standard errors above guessing.

    >>> is_guessing(0.55, 0.5, samples=100), is_guessing(0.55, 0.5, samples=10_000)
    (True, False)
    """
    error = math.sqrt(guess * (1 - guess) / samples)
    # A handful of samples cannot be three errors away, but all of them can be right.
    return reached <= guess + 3 * error and reached < 1


def _verdict(pupil: Pupil, feed: Feed) -> TaskFailed | None:
    """Whether a task's accuracy on its own training data is no better than guessing."""
    reached, guess = _reached(pupil, feed, _WITNESS), feed.guess()
    guesses = is_guessing(reached, guess, min(len(feed), _WITNESS))
    if guesses and not _tells_more_than_shares(pupil, feed):
        return TaskFailed(
            f"task {feed.task.name!r} was not learned: {reached:.1%} on its own training data is "
            f"not three standard errors above guessing ({guess:.1%}); another learning rate or "
            "more epochs may help"
        )
    return None


def _tells_more_than_shares(pupil: Pupil, feed: Feed) -> bool:
    """Whether answers make labels likelier than the shares of classes do, by three standard errors.
    Where one class is nearly all there is, much can be known and yet hardly a sample be answered
    with another."""
    each = max(1, _WITNESS // len(feed.parts))
    gains = []
    with torch.no_grad():
        for task, part in enumerate(feed.parts, pupil.learned):
            shares = part.task.train_y.bincount(minlength=part.task.classes).double() / len(part)
            for x, y in part.train(each):
                logs = pupil.predict(x, task).double().log_softmax(1)
                gains.append(logs.gather(1, y[:, None]).squeeze(1) - shares.log()[y])
    gain = torch.cat(gains)
    return len(gain) > 1 and bool(gain.mean() > 3 * gain.std() / math.sqrt(len(gain)))

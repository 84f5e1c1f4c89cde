"""Learning one task, with one network or with several at once: the epochs, and what to do when it
fails."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from rankup import seeds
from rankup.errors import RankupError, TaskStateError
from rankup.training.batches import Draws, Feed
from rankup.training.checkpoint import Checkpoint, CheckpointError, Learning
from rankup.training.engine.eager import Steps
from rankup.training.engine.learner import Learner
from rankup.training.engine.select import Engine
from rankup.training.evaluate import is_guessing, share_right
from rankup.training.optim import rates
from rankup.training.recipe import Recipe
from rankup.utils.signals import undisturbed

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
    """What learns tasks: a network, or a method with one."""

    @property
    def recipe(self) -> Recipe: ...

    @property
    def seed(self) -> int: ...

    @property
    def learned(self) -> int:
        """How many tasks it has learned."""

    @property
    def begins_afresh(self) -> bool:
        """Whether its next task is the first one of the network that will learn it."""

    def begin(self, task: Task) -> Learner:
        """Open a task, or raise and stay as before."""

    def predict(self, x: Tensor, task: int) -> Tensor:
        """Logits of a task that was learned or is open."""

    def end(self) -> None:
        """Commit what was learned of the open task."""

    def abandon(self) -> None:
        """Drop the open task, if there is one."""


@dataclass
class _Lesson:
    """One pupil learning its next task."""

    pupil: Pupil
    learner: Learner
    checkpoint: Checkpoint | None = None  # to resume from
    on_epoch: OnEpoch | None = None
    failure: TaskFailed | None = None
    is_over: bool = False

    @property
    def feed(self) -> Feed:
        return self.learner.feed

    @property
    def total_steps(self) -> int:
        return self.pupil.recipe.epochs * self.feed.steps_per_epoch

    @property
    def peak(self) -> float:
        """The highest rate."""
        recipe = self.pupil.recipe
        return recipe.first_lr if self.pupil.begins_afresh and recipe.first_lr else recipe.lr

    def rates(self, epoch: int) -> Sequence[float]:
        length = self.feed.steps_per_epoch
        planned = rates(self.pupil.recipe, self.peak, self.total_steps)
        return planned[epoch * length : (epoch + 1) * length]

    def sample_epoch(self, epoch: int) -> Draws:
        """Whatever is random in an epoch comes from the seed, the task's index and the epoch's
        number, so an interrupted run resumes from a checkpoint as if nothing had happened."""
        pupil = self.pupil
        return self.learner.sample_epoch(
            seeds.of_epoch(pupil.seed, pupil.learned, epoch, self.feed.device)
        )

    def about(self) -> Learning:
        pupil = self.pupil
        return Learning(self.feed.task.name, pupil.seed, pupil.recipe, pupil.learned)


def learn(
    pupils: Sequence[Pupil],
    tasks: Sequence[Task],
    engine: Engine,
    resume: Sequence[Checkpoint | None] | None = None,
    on_epoch: Sequence[OnEpoch | None] | None = None,
) -> list[TaskFailed | None]:
    """Let every pupil learn its next task, those with equal numbers of steps together.

    Returns for each why it failed, if it did; then it is as it was before. So are all whose task is
    still open when something else goes wrong, such as Ctrl-C.
    """
    points, tell = resume or [None] * len(pupils), on_epoch or [None] * len(pupils)
    lessons: list[_Lesson] = []
    try:
        for pupil, task, point, told in zip(pupils, tasks, points, tell, strict=True):
            with undisturbed():  # or a task could be left open that no lesson knows of
                lessons.append(_Lesson(pupil, pupil.begin(task), point, told))
        for together in _as_long(lessons):
            _train(together, engine.start([lesson.learner for lesson in together]))
        for lesson in lessons:
            lesson.failure = lesson.failure or _verdict(lesson.pupil, lesson.feed)
            if lesson.failure is None:
                lesson.pupil.end()
        return [lesson.failure for lesson in lessons]
    finally:
        for lesson in lessons:
            lesson.is_over = True
            lesson.pupil.abandon()


def _as_long(lessons: Sequence[_Lesson]) -> Iterable[list[_Lesson]]:
    """Groups with the same number of epochs and steps."""
    groups: dict[tuple[int, int], list[_Lesson]] = {}
    for lesson in lessons:
        length = lesson.pupil.recipe.epochs, lesson.feed.steps_per_epoch
        groups.setdefault(length, []).append(lesson)
    return groups.values()


def _train(lessons: Sequence[_Lesson], steps: Steps) -> None:
    """All epochs of lessons with equal numbers of steps."""
    pupil, per_epoch = lessons[0].pupil, lessons[0].feed.steps_per_epoch
    epochs = pupil.recipe.epochs
    for epoch in range(_resumed(lessons, steps), epochs):
        draws = [lesson.sample_epoch(epoch) for lesson in lessons]
        own = seeds.number(pupil.seed, "module", pupil.learned, epoch)
        steps.on_epoch_start(epoch)
        totals = steps.epoch(draws, [lesson.rates(epoch) for lesson in lessons], own)
        sums = totals.tolist()
        if any(lesson.on_epoch for lesson in lessons):
            steps.adopt()  # the callback may query the epoch, or the network itself
        for number, (lesson, total) in enumerate(zip(lessons, sums, strict=True)):
            if not math.isfinite(total):
                lesson.failure = lesson.failure or TaskFailed(
                    f"task {lesson.feed.task.name!r} diverged: the loss of epoch {epoch + 1} is "
                    f"{total / per_epoch}; a learning rate below {lesson.peak:g} may help"
                )
            elif lesson.on_epoch is not None:
                done = Epoch(epoch + 1, epochs, total / per_epoch, _look(lesson))
                _tell(lesson, done, steps, number)
        if all(lesson.failure for lesson in lessons):
            break
    steps.adopt()


def _tell(lesson: _Lesson, done: Epoch, steps: Steps, number: int) -> None:
    assert lesson.on_epoch is not None
    checkpoint = Checkpoint(done.number, lambda: steps.state(number), lesson.about())
    kept = weakref.ref(checkpoint)
    try:
        lesson.on_epoch(done, checkpoint)
    finally:
        del checkpoint
        if (held := kept()) is not None:
            # The callback kept it, maybe without reading its state: copied now, before another
            # step changes it. Python frees at once what nobody holds, so the weak reference tells
            # this; if it did not, one copy too many would be made.
            _ = held.state


def _resumed(lessons: Sequence[_Lesson], steps: Steps) -> int:
    """The epoch to resume from."""
    first, *others = [lesson.checkpoint.epoch if lesson.checkpoint else 0 for lesson in lessons]
    if any(other != first for other in others):
        raise CheckpointError("what is learned together was stopped after different epochs")
    for number, lesson in enumerate(lessons):
        if (point := lesson.checkpoint) is not None:
            point.refuse_other(lesson.about(), steps.state(number))
            steps.resume(number, point.state)
    return first


def _look(lesson: _Lesson) -> Callable[[], float]:
    # Keeping an epoch must not keep its task's data alive.
    name, known = lesson.feed.task.name, weakref.ref(lesson)

    def look() -> float:
        if (lesson := known()) is None or lesson.is_over:
            raise TaskStateError(
                f"an epoch of task {name!r} can be asked for its accuracy only while the task is "
                "being learned, which is over"
            )
        return _reached(lesson.pupil, lesson.feed, _PROBE)

    return look


def _reached(pupil: Pupil, feed: Feed, most: int) -> float:
    """The accuracy of what is being learned on at most `most` training samples."""
    each = max(1, most // len(feed.parts))
    found = [
        share_right(lambda x, task=task: pupil.predict(x, task), part.train(each))  # type: ignore[misc]
        for task, part in enumerate(feed.parts, pupil.learned)
    ]
    return sum(found) / len(found)


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
    If one class dominates, much can be known although hardly any sample is answered with
    another."""
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

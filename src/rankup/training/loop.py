"""The training loop, for one network or for several at once that each learn a task."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from rankup import seeds
from rankup.errors import RankupError, TaskStateError
from rankup.training.batches import Draws, Feed
from rankup.training.checkpoint import Checkpoint, CheckpointError, Origin
from rankup.training.engine.eager import Steps
from rankup.training.engine.learner import Learner
from rankup.training.engine.select import Engine
from rankup.training.evaluate import training_accuracy, why_not_learned
from rankup.training.optim import rates
from rankup.training.recipe import Recipe
from rankup.utils.signals import undisturbed

if TYPE_CHECKING:
    from rankup.data.tasks import Task

SHOWN = 1000  # training samples behind the accuracy that progress shows


class TaskFailed(RankupError):
    """A task could not be learned; the network is as it was before."""


@dataclass(frozen=True)
class Epoch:
    """A task's progress after an epoch.

    Attributes:
        number: how many epochs are done.
        epochs: how many there are in all.
        loss: the mean loss of the epoch.
        look: computes `accuracy()`.
    """

    number: int
    epochs: int
    loss: float
    look: Callable[[], float]

    def accuracy(self) -> float:
        """The accuracy on a sample of the training data, computed by this call."""
        return self.look()


OnEpoch = Callable[[Epoch, Checkpoint], None]


class Pupil(Protocol):
    """A network, or a method with one, that learns one task after another."""

    @property
    def recipe(self) -> Recipe: ...

    @property
    def seed(self) -> int: ...

    @property
    def learned(self) -> int:
        """How many tasks it has learned."""

    @property
    def begins_afresh(self) -> bool:
        """Whether its next task builds on no other, as the first task does."""

    @property
    def draws_by(self) -> int | str:
        """What the open task's random numbers are seeded by: its number, or its name."""

    def begin(self, task: Task) -> Learner:
        """Open a task, or raise and stay as before."""

    def predict(self, x: Tensor, task: int) -> Tensor:
        """Logits of a task that was learned or is open."""

    def end(self) -> None:
        """Commit what was learned of the open task."""

    def abandon(self) -> None:
        """Drop the open task, if there is one."""


def peak_rate(pupil: Pupil) -> float:
    """The highest learning rate of the task that a pupil begins."""
    recipe = pupil.recipe
    return recipe.first_lr if pupil.begins_afresh and recipe.first_lr else recipe.lr


@dataclass
class OpenTask:
    """A task that a pupil has begun and is being trained on."""

    pupil: Pupil
    learner: Learner
    resume: Checkpoint | None = None
    on_epoch: OnEpoch | None = None
    failure: TaskFailed | None = None

    @property
    def feed(self) -> Feed:
        return self.learner.feed

    def rates(self, epoch: int) -> Sequence[float]:
        recipe, steps = self.pupil.recipe, self.feed.steps_per_epoch
        of_task = rates(recipe, peak_rate(self.pupil), recipe.epochs * steps)
        return of_task[epoch * steps :][:steps]

    def sample_epoch(self, epoch: int) -> Draws:
        """An epoch's random numbers. They depend only on the seed, the task's number or name and
        the epoch's number, so a run resumes from a checkpoint with the same bits."""
        pupil = self.pupil
        return self.learner.sample_epoch(
            seeds.epoch_generator(pupil.seed, pupil.draws_by, epoch, self.feed.device)
        )

    def origin(self) -> Origin:
        pupil = self.pupil
        return Origin(self.feed.task.name, pupil.seed, pupil.recipe, pupil.learned)


def learn(
    pupils: Sequence[Pupil],
    tasks: Sequence[Task],
    engine: Engine,
    resume: Sequence[Checkpoint | None] | None = None,
    on_epoch: Sequence[OnEpoch | None] | None = None,
) -> list[TaskFailed | None]:
    """Train every pupil on its next task, those with equal numbers of steps together.

    Args:
        resume: for each pupil a checkpoint to resume from, or None.
        on_epoch: for each pupil a function to call after each epoch, or None.

    Returns:
        For each pupil why it failed, or None. A pupil that failed is as it was before, and so are
        all whose task is still open when an exception, such as Ctrl-C, ends the training.
    """
    open_tasks: list[OpenTask] = []
    try:
        for number, (pupil, task) in enumerate(zip(pupils, tasks, strict=True)):
            checkpoint = resume[number] if resume else None
            callback = on_epoch[number] if on_epoch else None
            with undisturbed():  # else a task could be open but not in the list
                open_tasks.append(OpenTask(pupil, pupil.begin(task), checkpoint, callback))
        for group in _with_equal_steps(open_tasks):
            train(group, engine.start([open_task.learner for open_task in group]))
        for open_task in open_tasks:
            if open_task.failure is not None:
                continue
            reason, ranks = why_not_learned(open_task.pupil, open_task.feed), open_task.feed.ranks
            if reason := ranks.of_first(reason) if ranks else reason:
                open_task.failure = TaskFailed(reason)
            else:
                open_task.pupil.end()
        return [open_task.failure for open_task in open_tasks]
    finally:
        for open_task in open_tasks:
            open_task.pupil.abandon()


def _with_equal_steps(open_tasks: Sequence[OpenTask]) -> Iterable[list[OpenTask]]:
    groups: dict[tuple[int, int], list[OpenTask]] = {}
    for open_task in open_tasks:
        length = open_task.pupil.recipe.epochs, open_task.feed.steps_per_epoch
        groups.setdefault(length, []).append(open_task)
    return groups.values()


def train(open_tasks: Sequence[OpenTask], steps: Steps) -> None:
    """Run all epochs of tasks with equal numbers of steps."""
    pupil, steps_per_epoch = open_tasks[0].pupil, open_tasks[0].feed.steps_per_epoch
    epochs = pupil.recipe.epochs
    for epoch in range(_resume(open_tasks, steps), epochs):
        draws = [open_task.sample_epoch(epoch) for open_task in open_tasks]
        module_seed = seeds.number(pupil.seed, "module", pupil.draws_by, epoch)
        steps.on_epoch_start(epoch)
        rates = [open_task.rates(epoch) for open_task in open_tasks]
        totals = steps.epoch(draws, rates, module_seed).tolist()
        if any(open_task.on_epoch for open_task in open_tasks):
            steps.adopt()  # the callback may ask for the accuracy, or run the network
        for number, (open_task, total) in enumerate(zip(open_tasks, totals, strict=True)):
            loss = total / steps_per_epoch
            if not math.isfinite(total):
                open_task.failure = open_task.failure or diverged(
                    open_task.feed.task, epoch + 1, loss, peak_rate(open_task.pupil)
                )
            elif open_task.on_epoch is not None:
                done = Epoch(epoch + 1, epochs, loss, _accuracy_now(open_task))
                _call_back(open_task.on_epoch, done, open_task, steps, number)
        if all(open_task.failure for open_task in open_tasks):
            break
    steps.adopt()


def diverged(task: Task, epoch: int, loss: float, peak: float) -> TaskFailed:
    return TaskFailed(
        f"task {task.name!r} diverged: the loss of epoch {epoch} is {loss}; a learning rate below "
        f"{peak:g} may help"
    )


def _resume(open_tasks: Sequence[OpenTask], steps: Steps) -> int:
    """Restore the checkpoints, if there are any. Returns the epoch to start with."""
    points = [open_task.resume for open_task in open_tasks]
    first, *others = (point.epoch if point else 0 for point in points)
    if any(other != first for other in others):
        raise CheckpointError("what is learned together was stopped after different epochs")
    for number, (open_task, point) in enumerate(zip(open_tasks, points, strict=True)):
        if point is not None:
            point.refuse_other(open_task.origin(), steps.state(number))
            steps.resume(number, point.state)
    return first


def _accuracy_now(open_task: OpenTask) -> Callable[[], float]:
    # A weak reference, so that an `Epoch` does not keep its task's data in memory.
    name, reference = open_task.feed.task.name, weakref.ref(open_task)

    def accuracy() -> float:
        if (open_task := reference()) is None:
            raise TaskStateError(
                f"an epoch of task {name!r} can be asked for its accuracy only while the task is "
                "being learned, which is over"
            )
        return training_accuracy(open_task.pupil, open_task.feed, SHOWN)

    return accuracy


def _call_back(
    on_epoch: OnEpoch, epoch: Epoch, open_task: OpenTask, steps: Steps, number: int
) -> None:
    checkpoint = Checkpoint(epoch.number, lambda: steps.state(number), open_task.origin())
    reference = weakref.ref(checkpoint)
    try:
        on_epoch(epoch, checkpoint)
    finally:
        del checkpoint
        if (kept := reference()) is not None:
            _ = kept.state  # if the callback keeps it, copy its tensors before a step changes them

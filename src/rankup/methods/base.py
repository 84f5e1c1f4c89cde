"""The interface of methods, which learn one task after another and answer for all of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

import torch
from torch import Tensor, nn

from rankup.data.tasks import Task
from rankup.growing.options import GrowOptions
from rankup.methods.options import Options
from rankup.metrics import Footprint
from rankup.net.guess import Untold
from rankup.training.checkpoint import Checkpoint
from rankup.training.engine.learner import Learner
from rankup.training.engine.select import Engine
from rankup.training.loop import OnEpoch, learn
from rankup.training.recipe import Recipe
from rankup.utils.torch_modes import learning_on

Own = TypeVar("Own", bound=Options)


@dataclass(frozen=True)
class Setting:
    """What a method is made from.

    Of the tasks a method may use the number, their numbers of classes and, to refuse inputs that
    cannot be mixed, the shapes and dtypes of these. Only methods that are not marked as continual
    may use the data of tasks before they begin.

    Attributes:
        module: the architecture.
        grow_options: how `rankup.grow` would make a network of factors from it.
        recipe: how each task is learned.
        seed: the seed of all randomness.
        tasks: all tasks of the stream.
        options: the method's own options.
    """

    module: nn.Module
    grow_options: GrowOptions
    recipe: Recipe
    seed: int
    tasks: Sequence[Task]
    options: Options

    def options_of(self, kind: type[Own]) -> Own:
        """The options, typed as the method's own."""
        assert isinstance(self.options, kind)
        return self.options


class Method(ABC):
    """One way to learn a stream of tasks.

    A task is opened by `begin`, which returns its learner; once that has been trained, `end`
    commits what it learned, or `abandon` drops it. Between tasks a method can be stored:
    `load(folder, setting)` after `save(folder)` gives a method that continues as this one would.

    Attributes:
        setting: what the method was made from.
        learns_all_at_once: whether all tasks are learned together with the first.
    """

    setting: Setting
    learns_all_at_once = False

    @abstractmethod
    def __init__(self, setting: Setting) -> None: ...

    @classmethod
    def check(cls, setting: Setting) -> None:
        """Raise `RankupError` for an unsuitable setting; by default, accept all."""
        return

    @property
    @abstractmethod
    def learned(self) -> int:
        """How many tasks it has learned."""

    @property
    def begins_afresh(self) -> bool:
        """Whether the next task is learned by a network that has not learned any."""
        return self.learned == 0

    @property
    def draws_by(self) -> int | str:
        """The task's part of the seed of the open task's epochs: its index or name."""
        return self.learned

    @abstractmethod
    def begin(self, task: Task) -> Learner:
        """Open the next task and return its learner, or raise and leave the state unchanged."""

    @abstractmethod
    def predict(self, x: Tensor, task: int) -> Tensor:
        """`[B, C]`: logits for the task with that index, which is learned or open."""

    @torch.no_grad()
    def untold(self, x: Tensor) -> Untold:
        """Logits `[B, ΣC]` for all classes of all learned tasks, and the likeliest task `[B]`: by
        default the one with the largest logit."""
        classes = [task.classes for task in self.setting.tasks[: self.learned]]
        each = [self.predict(x, task)[:, :count].float() for task, count in enumerate(classes)]
        largest = torch.stack([logits.amax(1) for logits in each], 1)
        return Untold(torch.cat(each, 1), largest.argmax(1))

    @abstractmethod
    def end(self) -> None:
        """Commit the open task."""

    @abstractmethod
    def abandon(self) -> None:
        """Drop the open task, if there is one, and restore the state before it."""

    @abstractmethod
    def footprint(self) -> Footprint:
        """The size of everything that must be stored to answer for all learned tasks and to learn
        the next."""

    @abstractmethod
    def saving(self, folder: Path) -> Callable[[], None]:
        """Capture the current state and return a function that writes it to a folder, from any
        thread. Until it has returned, the method may answer but not learn: `predict` may replace
        tensors, but must not modify them in place."""

    def save(self, folder: Path) -> None:
        """Write the current state to a folder."""
        self.saving(folder)()

    @classmethod
    @abstractmethod
    def is_in(cls, folder: Path) -> bool:
        """Whether a folder holds a complete save, and not just fragments of an interrupted one."""

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, setting: Setting) -> Self:
        """Read the state that `save` wrote of a method with the same setting."""

    @property
    def recipe(self) -> Recipe:
        return self.setting.recipe

    @property
    def seed(self) -> int:
        return self.setting.seed

    def learn(self, task: Task, resume: Checkpoint | None, on_epoch: OnEpoch | None) -> None:
        """Learn the next task, or raise `TaskFailed` and leave the state unchanged."""
        with learning_on(next(self.setting.module.parameters()).device):
            (failure,) = learn([self], [task], Engine(), [resume], [on_epoch])
        if failure is not None:
            raise failure

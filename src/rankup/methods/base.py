"""The interface of methods: they learn one task after another and answer for all of them."""

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
    """What a method is made from: a module for the architecture, how the rank update would grow
    it, the recipe, the seed of all randomness, the tasks to come and the method's own options.

    A method may look at the number of tasks to come, their numbers of classes and, to refuse what
    it cannot mix, the shapes and dtypes of their inputs; only methods marked as not continual may
    use their data.
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
    """One way to learn a stream.

    A method keeps its state on disk between tasks: `load(folder, setting)` after `save(folder)`
    gives a method that continues as this one would.
    """

    setting: Setting
    learns_all_at_once = False  # with the first task all others

    @abstractmethod
    def __init__(self, setting: Setting) -> None: ...

    @classmethod
    def check(cls, setting: Setting) -> None:
        """Refuse an unsuitable setting before anything is made; by default none is refused."""
        return

    @property
    @abstractmethod
    def learned(self) -> int:
        """How many tasks it has learned."""

    @property
    def begins_afresh(self) -> bool:
        """Whether the network that will learn the next task has learned none before."""
        return self.learned == 0

    @property
    def draws_by(self) -> int | str:
        """What the open task's draws are seeded by."""
        return self.learned

    @abstractmethod
    def begin(self, task: Task) -> Learner:
        """Open the next task, or raise and leave the state unchanged."""

    @abstractmethod
    def predict(self, x: Tensor, task: int) -> Tensor:
        """Logits for the task with that index, which is learned or open."""

    @torch.no_grad()
    def untold(self, x: Tensor) -> Untold:
        """Logits for all classes of all learned tasks, and the likeliest task: by default the one
        that has the largest logit."""
        classes = [task.classes for task in self.setting.tasks[: self.learned]]
        each = [self.predict(x, task)[:, :count].float() for task, count in enumerate(classes)]
        largest = torch.stack([logits.amax(1) for logits in each], 1)
        return Untold(torch.cat(each, 1), largest.argmax(1))

    @abstractmethod
    def end(self) -> None:
        """Add what was learned of the open task to what is known."""

    @abstractmethod
    def abandon(self) -> None:
        """Drop the open task, if there is one, and restore the state before it."""

    @abstractmethod
    def footprint(self) -> Footprint:
        """The size of all it must store to answer for all tasks and to learn the next."""

    @abstractmethod
    def saving(self, folder: Path) -> Callable[[], None]:
        """Capture the current state and return a function that writes it to a folder, from any
        thread. Until that is done the method may answer but not learn: `predict` may replace
        tensors, but must not modify any in place."""

    def save(self, folder: Path) -> None:
        self.saving(folder)()

    @classmethod
    @abstractmethod
    def is_in(cls, folder: Path) -> bool:
        """Whether the folder holds a complete save; a killed one may leave fragments."""

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, setting: Setting) -> Self: ...

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

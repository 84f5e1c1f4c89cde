"""What a method is: something that learns one task after another and answers for all of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from torch import Tensor, nn

from rankup.checkpoint import Checkpoint
from rankup.data.tasks import Task
from rankup.engine import Engine
from rankup.growth import Growth
from rankup.methods.options import Options
from rankup.metrics import Footprint
from rankup.modes import learning_on, outside_inference
from rankup.recipe import Recipe
from rankup.steps import Learner
from rankup.train import OnEpoch, learn

Own = TypeVar("Own", bound=Options)


@dataclass(frozen=True)
class Setting:
    """What a method is made from: a module for the architecture, how the rank update would grow
    it, the recipe, the seed of all that is random, the tasks to come and the method's own options.

    Of the tasks to come a method may ask how many there are, how many classes each has and, to
    refuse what it cannot mix, of what shape and dtype inputs are; their data is for those that are
    marked as not continual.
    """

    module: nn.Module
    growth: Growth
    recipe: Recipe
    seed: int
    tasks: Sequence[Task]
    options: Options

    def options_of(self, kind: type[Own]) -> Own:
        """The options, as those of the method that they are for."""
        assert isinstance(self.options, kind)
        return self.options


class Method(ABC):
    """One way to learn a stream.

    A method keeps what it knows on disk between tasks: `load(folder, setting)` after
    `save(folder)` gives a method that goes on as this one would.
    """

    setting: Setting

    @abstractmethod
    def __init__(self, setting: Setting) -> None: ...

    @classmethod
    def check(cls, setting: Setting) -> None:
        """Refuse a setting that does not suit the method: none. Nothing is made before it."""
        return

    @property
    @abstractmethod
    def learned(self) -> int:
        """How many tasks it has learned."""

    @property
    def begins_afresh(self) -> bool:
        """Whether its next task is the first that the network which will learn it learns."""
        return self.learned == 0

    @abstractmethod
    def begin(self, task: Task) -> Learner:
        """Open the next task, or raise and be as before."""

    @abstractmethod
    def predict(self, x: Tensor, task: int) -> Tensor:
        """Logits of the task with that index, which was learned or is open."""

    @abstractmethod
    def end(self) -> None:
        """Make what was learned of the open task a part of what is known."""

    @abstractmethod
    def abandon(self) -> None:
        """Drop the open task, if there is one, and be as before it."""

    @abstractmethod
    def footprint(self) -> Footprint:
        """Everything it must store to answer for all tasks and to learn the next."""

    @abstractmethod
    def saving(self, folder: Path) -> Callable[[], None]:
        """Take what it knows now; what is given back writes it to a folder, in any thread. Until
        that is done it may answer for tasks, and learn none: `predict` may exchange tensors for
        others, and must not change any."""

    def save(self, folder: Path) -> None:
        self.saving(folder)()

    @classmethod
    @abstractmethod
    def is_in(cls, folder: Path) -> bool:
        """Whether the folder holds one that was saved whole; a killed save may leave bits of it."""

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
        """Learn the next task, or raise `TaskFailed` and be as before."""
        with outside_inference(), learning_on(next(self.setting.module.parameters()).device):
            (failure,) = learn([self], [task], Engine(), [resume], [on_epoch])
        if failure is not None:
            raise failure

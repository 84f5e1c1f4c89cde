"""The task being learned, after a finished epoch: what was stopped resumes from there."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from rankup.errors import RankupError
from rankup.layers import Tensors
from rankup.training.recipe import Recipe


class CheckpointError(RankupError):
    """A checkpoint is of another task, network or recipe; nothing was changed."""


class Learning(NamedTuple):
    """What is being learned, and how."""

    task: str
    seed: int
    recipe: Recipe
    tasks_before: int | None = None  # tasks that the network knows already, if known


class Checkpoint:
    """Everything needed to resume after an epoch.

    Args:
        epoch: epochs done.
        state: tensors by name, or a function that gives the live ones, copied on first access:
            copying takes time, and steps change them.
        of: what was being learned, if known: nothing else resumes from here.
        seconds: time that the task has taken until then, if measured.
    """

    def __init__(
        self,
        epoch: int,
        state: Tensors | Callable[[], Tensors],
        of: Learning | None = None,
        seconds: float = 0.0,
    ) -> None:
        self.epoch, self._state, self.of, self.seconds = epoch, state, of, seconds

    @property
    def state(self) -> Tensors:
        if callable(self._state):
            live = self._state()
            self._state = {name: t.detach().to("cpu", copy=True) for name, t in live.items()}
        return self._state

    def __reduce__(self) -> tuple[type[Checkpoint], tuple[int, Tensors, Learning | None, float]]:
        return Checkpoint, (self.epoch, self.state, self.of, self.seconds)

    def refuse_other(self, here: Learning, wanted: Tensors) -> None:
        """Raise if something else is to be learned, or if its state has other tensors."""
        if self.of is not None and self.of != here:
            for what in ("task", "seed"):
                given, own = getattr(self.of, what), getattr(here, what)
                if given != own:
                    raise CheckpointError(
                        f"the checkpoint is for {what} {given!r}, but this is {own!r}"
                    )
            if self.of.recipe != here.recipe:
                raise CheckpointError("the checkpoint was made with a different recipe")
            if self.of.tasks_before is not None:
                raise CheckpointError(
                    f"the checkpoint is for a network that knew {self.of.tasks_before} tasks, but "
                    f"this one knows {here.tasks_before}"
                )
        epochs = here.recipe.epochs
        if not 0 < self.epoch <= epochs:
            raise CheckpointError(
                f"the checkpoint was made after epoch {self.epoch}, but the recipe has {epochs}"
            )
        for name in {**wanted, **self.state}:
            there, here_it_is = _kind_of(self.state.get(name)), _kind_of(wanted.get(name))
            if there != here_it_is:
                raise CheckpointError(
                    f"the checkpoint was made with a different network or optimiser: {name!r} is "
                    f"{there} in it, but {here_it_is} here"
                )


def _kind_of(tensor: Tensor | None) -> str:
    if tensor is None:
        return "missing"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"

"""Checkpoints: the state of an open task after an epoch, from which training resumes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from rankup.errors import RankupError
from rankup.layers import Tensors
from rankup.training.recipe import Recipe


class CheckpointError(RankupError):
    """A checkpoint is of another task, network or recipe; nothing was changed."""


class Origin(NamedTuple):
    """The task, seed, recipe and network that a checkpoint belongs to."""

    task: str
    seed: int
    recipe: Recipe
    tasks_before: int | None = None  # tasks that the network had learned, if known


class Checkpoint:
    """Everything needed to resume after an epoch.

    Args:
        epoch: epochs done.
        state: tensors by name, or a function that gives the live ones, copied on first access:
            copying takes time, and steps change them.
        origin: what it was made from, if known: nothing else resumes from it.
        seconds: training time of the task until then, if measured.
    """

    def __init__(
        self,
        epoch: int,
        state: Tensors | Callable[[], Tensors],
        origin: Origin | None = None,
        seconds: float = 0.0,
    ) -> None:
        self.epoch, self._state, self.origin, self.seconds = epoch, state, origin, seconds

    @property
    def state(self) -> Tensors:
        if callable(self._state):
            live = self._state()
            self._state = {name: t.detach().to("cpu", copy=True) for name, t in live.items()}
        return self._state

    def __reduce__(self) -> tuple[type[Checkpoint], tuple[int, Tensors, Origin | None, float]]:
        return Checkpoint, (self.epoch, self.state, self.origin, self.seconds)

    def refuse_other(self, current: Origin, wanted: Tensors) -> None:
        """Raise if this is of another task, seed, recipe or network, or has other tensors."""
        origin = self.origin
        if origin is not None and origin != current:
            for name in ("task", "seed"):
                before, now = getattr(origin, name), getattr(current, name)
                if before != now:
                    raise CheckpointError(
                        f"the checkpoint is for {name} {before!r}, but this is {now!r}"
                    )
            if origin.recipe != current.recipe:
                raise CheckpointError("the checkpoint was made with a different recipe")
            if origin.tasks_before is not None:
                raise CheckpointError(
                    f"the checkpoint is for a network that knew {origin.tasks_before} tasks, but "
                    f"this one knows {current.tasks_before}"
                )
        epochs = current.recipe.epochs
        if not 0 < self.epoch <= epochs:
            raise CheckpointError(
                f"the checkpoint was made after epoch {self.epoch}, but the recipe has {epochs}"
            )
        for name in {**wanted, **self.state}:
            before, now = _description(self.state.get(name)), _description(wanted.get(name))
            if before != now:
                raise CheckpointError(
                    f"the checkpoint was made with a different network or optimiser: {name!r} is "
                    f"{before} in it, but {now} here"
                )


def _description(tensor: Tensor | None) -> str:
    if tensor is None:
        return "missing"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"

"""The active task: which one the layers of a network run for.

The network's forward sets it for its thread, so threads may run different tasks at once. When
activation checkpointing runs a part of the module again in the backward pass, which may be in
another thread and long after, it runs for the task of its forward.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from rankup.errors import RankupError
from rankup.utils.per_thread import PerThread, set_to

# The index of the task being learned: the same one for every task, so that what torch.compile has
# compiled for one serves the next.
LEARNING = 1 << 30

_active = PerThread[int | Tensor]()
_widest = PerThread[bool]()
_head_inputs = PerThread[list[Tensor]]()


def active(task: int | Tensor | None) -> AbstractContextManager[None]:
    """Run the body of the `with` for one task, or for a task per sample, given by index. None is
    accepted too, so that what `active_task()` returned can be passed on."""
    if isinstance(task, Tensor) and not task.dim():
        task = int(task)
    if not isinstance(task, int | Tensor | None):
        raise RankupError(f"active takes a task's index, got {task!r}")
    return set_to(_active, task)


def active_task() -> int | Tensor | None:
    """The task, or the task of each sample, that layers are run for; None outside of a network."""
    task = _active.value
    if task is not None and not torch.compiler.is_compiling() and torch.is_grad_enabled():
        _keep_for_recomputation(task)
    return task


def as_wide_as_widest() -> AbstractContextManager[None]:
    """Inside, heads answer for one task as in a mixed batch: as wide as the widest task's, with
    −inf where a task has fewer classes."""
    return set_to(_widest, True)


def answers_like_widest() -> bool:
    return bool(_widest.value)


@contextmanager
def head_inputs() -> Iterator[list[Tensor]]:
    """Inside, what heads are given is noted in the list."""
    noted: list[Tensor] = []
    with set_to(_head_inputs, noted):
        yield noted


def notes_head_inputs() -> bool:
    return _head_inputs.value is not None


def note_head_input(x: Tensor) -> None:
    if (noted := _head_inputs.value) is not None:
        noted.append(x)


def _keep_for_recomputation(task: int | Tensor) -> None:
    """If a checkpoint (`torch.utils.checkpoint` with `use_reentrant=False`) is being recorded, have
    its recomputation run for this task. Torch has no public name for the checkpoint that records,
    but its hook for saved tensors holds it. Were it not found, layers would refuse to run again
    without a task."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        return
    for cell in getattr(hooks[0], "__closure__", None) or ():
        again = getattr(cell.cell_contents, "recompute_fn", None)
        if again is not None and not isinstance(again, _ForTask):
            cell.cell_contents.recompute_fn = _ForTask(task, again)


class _ForTask:
    """A function that runs for a task, whatever the thread's own is."""

    def __init__(self, task: int | Tensor, function: Callable[..., Any]) -> None:
        self.task, self.function = task, function

    def __call__(self, *args: Any) -> Any:
        with active(self.task):
            return self.function(*args)

"""The active task, for which the layers of a network run.

The network's forward sets it for the current thread, so threads may run different tasks at once.
Activation checkpointing runs parts of a module again in the backward pass, perhaps in another
thread: they then run for the task of their forward.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from rankup.errors import RankupError
from rankup.utils.per_thread import PerThread, set_to

# In place of the index of the task being learned: the same for every task, so that torch.compile
# does not compile again for the next one.
LEARNING = 1 << 30

_active = PerThread[int | Tensor]()
_widest = PerThread[bool]()
_head_inputs = PerThread[list[Tensor]]()


def active(task: int | Tensor | None) -> AbstractContextManager[None]:
    """Inside, layers run for one task, or for a task per sample, given by index. What
    `active_task()` returned can be passed on, None included."""
    if isinstance(task, Tensor) and not task.dim():
        task = int(task)
    if not isinstance(task, int | Tensor | None):
        raise RankupError(f"active takes a task's index, got {task!r}")
    return set_to(_active, task)


def active_task() -> int | Tensor | None:
    """The index of the active task, or in a mixed batch that of each sample's, `[B]`; None outside
    of a network's forward."""
    task = _active.value
    if task is not None and not torch.compiler.is_compiling() and torch.is_grad_enabled():
        _keep_for_recomputation(task)
    return task


def as_wide_as_widest() -> AbstractContextManager[None]:
    """Inside, heads give as many logits for one task as in a mixed batch: those of the task with
    the most classes, −inf where the active one has fewer."""
    return set_to(_widest, True)


def answers_like_widest() -> bool:
    return bool(_widest.value)


@contextmanager
def head_inputs() -> Iterator[list[Tensor]]:
    """Inside, the inputs of heads are appended to the list."""
    noted: list[Tensor] = []
    with set_to(_head_inputs, noted):
        yield noted


def notes_head_inputs() -> bool:
    return _head_inputs.value is not None


def note_head_input(x: Tensor) -> None:
    if (noted := _head_inputs.value) is not None:
        noted.append(x)


def _keep_for_recomputation(task: int | Tensor) -> None:
    """If a checkpoint (`torch.utils.checkpoint` with `use_reentrant=False`) is recording, let its
    recomputation run for this task.

    Torch has no public name for it, but its hook for saved tensors refers to it. If a later torch
    changes this, recomputation fails with an error that there is no active task.
    """
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

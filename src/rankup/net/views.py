"""Answers of tasks that were learned from images in four turns.

While such a task is learned, its head has a row for each class in each turn: row r·C + c is class
c, turned r times. Its answer has C logits. With one view the module runs on the image as it is, and
only the first C rows are kept. With four views it runs on the image in all four turns, and the
logits are the mean over turns, each taken from the rows of its own turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rankup.data.transforms import TURNS, all_turns
from rankup.errors import RankupError
from rankup.net.groups import Run
from rankup.net.tasks import KnownTask
from rankup.utils.compiling import run_as_it_is


@run_as_it_is
def answer(task: KnownTask, x: Any, options: dict[str, Any], run: Run) -> Tensor:
    """A task's logits, `[B, C]`. `run` runs the module with all rows of the task's head."""
    if task.views == 1:
        return _checked(run(x, options), len(x), task)[:, : task.classes]
    _refuse_options(options)
    return averaged(_checked(run(all_turns(x), {}), TURNS * len(x), task), task.classes)


def averaged(logits: Tensor, classes: int) -> Tensor:
    """Logits `[B, C]` from `[4·B, 4·C]`: the mean over turns, each with its own rows.

    >>> averaged(torch.tensor([[1.0, 0, 0, 0], [0, 3, 0, 0], [0, 0, 5, 0], [0, 0, 0, 7]]), 1)
    tensor([[4.]])
    """
    blocks = logits.reshape(TURNS, logits.shape[0] // TURNS, TURNS, classes)
    return blocks.diagonal(dim1=0, dim2=2).mean(-1)  # of [B, C, 4]


@run_as_it_is
def answer_mixed(
    tasks: Sequence[KnownTask],
    x: Tensor,
    indices: Tensor,
    options: dict[str, Any],
    run: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """The logits of a mixed batch, `[B, widest C]`, if any task has four views. The module runs on
    all samples in four turns, so that this does not read the values of `indices`.

    Args:
        indices: `[B]`, the task of each sample.
        run: runs the module on images, for the tasks of given indices, with all rows of heads.
    """
    _refuse_options(options)
    answers = run(all_turns(x), indices.repeat(TURNS))
    device, indices = answers.device, indices.to(answers.device)
    answers = answers.view(TURNS, x.shape[0], answers.shape[1])  # [4, B, most rows]
    views, classes = (
        torch.tensor(counts, device=device)[indices, None]
        for counts in ([task.views for task in tasks], [task.classes for task in tasks])
    )
    columns = torch.arange(max(task.classes for task in tasks), device=device)
    own = []
    for turn, logits in enumerate(answers):
        rows = (turn * classes + columns).clamp(max=logits.shape[1] - 1)  # [B, widest C]
        own.append(torch.where(turn < views, logits.gather(1, rows), 0))
    mean = torch.stack(own).sum(0) / views
    return mean.masked_fill(columns >= classes, -math.inf)


def answer_in_all_turns(module: nn.Module, classes: int) -> None:
    """Let a merged module, whose head has all rows, answer from four views. This is done by hooks,
    so that the module keeps its class and its state dict's names."""
    module.register_forward_pre_hook(_turn)
    module.register_forward_hook(_Averaging(classes))


def _turn(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor]:
    (x,) = inputs
    return (all_turns(x),)


class _Averaging:
    """A hook that can be pickled."""

    def __init__(self, classes: int) -> None:
        self.classes = classes

    def __call__(self, module: nn.Module, inputs: Any, logits: Tensor) -> Tensor:
        return averaged(logits, self.classes)


def _checked(logits: Any, samples: int, task: KnownTask) -> Tensor:
    wanted = [samples, task.rows]
    shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if shape != wanted:
        raise RankupError(
            f"task {task.name!r} is learned with rotations, for which a module returns a tensor of "
            f"logits, {wanted} for {samples} images and {task.rows} rows of its head, got {shape}"
        )
    return logits  # type: ignore[no-any-return]


def _refuse_options(options: dict[str, Any]) -> None:
    if options:
        raise RankupError(
            f"a task that answers from four views takes images alone, got {min(options)!r}, too"
        )

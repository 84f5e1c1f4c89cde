"""Batches whose samples belong to different tasks."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from rankup import seeds
from rankup.errors import RankupError
from rankup.layers import RowsError, active
from rankup.net.tasks import TaskList

MISSING: Any = object()  # in place of inputs, if all are named
Run = Callable[[Any, dict[str, Any]], Any]  # takes inputs and the module's own options

_MOST_TRIALS = 1000  # kinds of calls that are tried: with more, some option must be a counter


@dataclass
class MixedBatches:
    """Answers mixed batches for the tasks of one network.

    A layer compares its number of rows with the number of samples. A module that puts another
    dimension first, of the same size by chance, would pass. So a module is tried once with fewer
    samples for every shape of batch and kind of options it is called with. A module that folds
    other dimensions into the batch, as window attention does, runs task after task.
    """

    _tasks: TaskList
    one_by_one: bool = False  # modules that read a task's tensors run for one task at a time
    _tried: dict[Any, bool] = field(default_factory=dict)

    def answer(
        self, x: Any, tasks: Tensor, options: dict[str, Any], run: Run, device: torch.device
    ) -> Any:
        """The answer of a module, run by `run` on a device, for a task per sample."""
        known = len(self._tasks.tasks)
        indices, copied = self._checked(tasks, x, device)
        if self.one_by_one or not self._runs_in_one_pass(x, indices, options, run):
            if copied is None or copied.all_below(known):
                return _by_groups(x, indices, options, run)
        else:
            with active(indices):
                y = run(x, options)
            if copied is None or copied.all_below(known):
                return y
        self._refuse_unknown(copied.indices)  # or the task was committed in the meantime
        return self.answer(x, tasks, options, run, device)

    def _checked(
        self, tasks: Tensor, x: Any, device: torch.device
    ) -> tuple[Tensor, "HostCopy | None"]:
        """The indices as layers take them. If checking them would mean waiting for the device, they
        are clamped into range, and a copy is returned to be checked afterwards."""
        if tasks.dim() != 1 or tasks.is_floating_point() or tasks.dtype == torch.bool:
            raise RankupError(
                "the tasks of a mixed batch must be a tensor of one index per sample, got shape "
                f"{list(tasks.shape)} of {tasks.dtype}"
            )
        if isinstance(x, Tensor) and not x.dim():
            raise RankupError("a mixed batch must have a dimension of samples, got a single number")
        if isinstance(x, Tensor) and len(x) != len(tasks):
            raise RankupError(f"got {len(tasks)} task indices for {len(x)} samples")
        indices = tasks.to(device, torch.long)
        capturing = indices.is_cuda and torch.cuda.is_current_stream_capturing()
        if not len(tasks) or capturing:
            return indices, None
        known = len(self._tasks.tasks)
        if tasks.is_cuda and indices.is_cuda and known and not torch.compiler.is_compiling():
            return indices.clamp(0, known - 1), HostCopy.of(indices)
        if torch._C._functorch.is_batchedtensor(tasks):
            raise RankupError(
                "vmap cannot map over a task per sample: run a mixed batch in one call of the "
                "network, net(x, task=indices)"
            )
        self._refuse_unknown(tasks)
        return indices, None

    def _refuse_unknown(self, tasks: Tensor) -> None:
        for index in torch.aminmax(tasks):
            self._tasks.committed(int(index))

    def _runs_in_one_pass(self, x: Any, tasks: Tensor, options: dict[str, Any], run: Run) -> bool:
        """Whether a module takes a mixed batch of this shape and with such options in one pass."""
        samples = len(tasks)
        if samples < 2:
            return True
        if isinstance(x, Tensor) and not options:  # the usual case, kept fast
            kind: Any = x.shape[1:]
        else:
            leaves, form = tree_flatten((x, options))
            kind = (str(form), *(_kind(leaf, samples) for leaf in leaves))
        if kind not in self._tried:
            if len(self._tried) == _MOST_TRIALS:
                return True
            self._tried[kind] = _takes_one_pass(x, tasks, options, run)
        return self._tried[kind]


def _takes_one_pass(x: Any, tasks: Tensor, options: dict[str, Any], run: Run) -> bool:
    """Try a module with few samples; raise if it keeps something else than samples in front.

    One that folds other dimensions into the batch has the same multiple of rows for two samples as
    for three, and a layer that runs on what all samples share has one row. Either can run task
    after task.
    """
    leaves, form = tree_flatten((x, options))
    samples = len(tasks)
    if not any(_is_per_sample(leaf, samples) for leaf in leaves):
        return True

    def trial(few: int) -> RowsError | None:
        inputs, settings = tree_unflatten([_first(leaf, samples, few) for leaf in leaves], form)
        return _try(inputs, _first(tasks, samples, few), settings, run)

    few, other = (3, 2) if samples == 2 else (2, 3)
    error = trial(few)
    if error is None:
        return True
    if (second := trial(other)) is not None:
        is_shared, folds = error.rows == second.rows == 1, error.rows * other == second.rows * few
        if is_shared or folds:
            return False
    raise RankupError(
        f"in a trial run with {few} samples, before the {samples} of the mixed batch: {error}"
    ) from error


def _try(inputs: Any, tasks: Tensor, options: dict[str, Any], run: Run) -> RowsError | None:
    try:
        with seeds.seeded_rng(tasks.device, 0), torch.no_grad(), active(tasks):
            run(inputs, options)
    except RowsError as error:
        return error
    except RankupError as error:
        raise RankupError(f"in a trial run with {len(tasks)} samples: {error}") from error
    except Exception:
        # Tells nothing: the module may be unable to run on so few, or on a mask that was cut
        # because it happened to be as long as the batch.
        pass
    return None


def _first(leaf: Any, samples: int, few: int) -> Any:
    """A few samples, the first more than once if there are not as many, of a tensor with an entry
    per sample; any other leaf as it is. Never one sample, whose dimension a module may squeeze."""
    if not _is_per_sample(leaf, samples):
        return leaf
    # Copies, because a module may change what it is given.
    return torch.cat([leaf[:few], leaf[: max(0, few - samples)]])


def _by_groups(x: Any, tasks: Tensor, options: dict[str, Any], run: Run) -> Any:
    """Run the samples of each task by themselves, and put the rows back in their order."""
    leaves, form = tree_flatten((x, options))
    places: list[Tensor] = []
    answers: list[list[Any]] = []
    for task in sorted(set(tasks.tolist())):
        rows = (tasks == task).nonzero()[:, 0]
        chosen = [leaf[rows] if _is_per_sample(leaf, len(tasks)) else leaf for leaf in leaves]
        inputs, settings = tree_unflatten(chosen, form)
        with active(int(task)):
            found, answer_form = tree_flatten(run(inputs, settings))
        places.append(rows)
        answers.append(found)
    order = torch.cat(places).argsort()
    joined = [_joined(parts, places, order) for parts in zip(*answers, strict=True)]
    return tree_unflatten(joined, answer_form)


def _joined(parts: tuple[Any, ...], places: list[Tensor], order: Tensor) -> Any:
    """One leaf of all groups' answers: rows in the batch's order, −inf where a task has fewer
    classes than the widest; what is not a tensor of rows as the first group gave it."""
    per_row = all(_is_per_sample(p, len(rows)) for p, rows in zip(parts, places, strict=True))
    if not per_row:
        return parts[0]
    widest = max(part.shape[-1] for part in parts)
    padded = [
        F.pad(part, (0, widest - part.shape[-1]), value=-math.inf)
        if part.dim() > 1 and part.shape[-1] < widest
        else part
        for part in parts
    ]
    return torch.cat(padded)[order]


def _is_per_sample(leaf: Any, samples: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == samples


def _kind(leaf: Any, samples: int) -> Any:
    """What decides how a module runs: shapes and modes, not numbers that it computes with."""
    if isinstance(leaf, Tensor):
        return leaf.shape[1:] if _is_per_sample(leaf, samples) else leaf.shape
    return leaf if isinstance(leaf, str | int | None) else type(leaf)


class HostCopy:
    """Indices copied from a GPU to the host. Reading them waits for the copy and what was queued
    before it, not for what was queued after."""

    # By device and number of indices. Allocating pinned memory and an event would take longer than
    # the copy; copies in use are not listed, so threads and nested calls share none.
    _spare: ClassVar[dict[tuple[torch.device, int], "HostCopy"]] = {}
    _MOST_SPARE = 16

    def __init__(self, device: torch.device, count: int) -> None:
        self.key = device, count
        with torch.inference_mode(False):  # else it could not be written to outside of it
            self.indices = torch.empty(count, dtype=torch.long, device="cpu", pin_memory=True)
        self._unsigned = self.indices.numpy().view("uint64")  # negative ones are the highest
        self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @classmethod
    def of(cls, indices: Tensor) -> "HostCopy":
        device, count = indices.device, len(indices)
        copied = cls._spare.pop((device, count), None) or cls(device, count)
        copied.indices.copy_(indices, non_blocking=True)
        copied._there.record(torch.cuda.current_stream(device))
        return copied

    def all_below(self, known: int) -> bool:
        """Whether all are among the first `known` tasks; if so, this copy is spent."""
        self._there.synchronize()
        if int(self._unsigned.max()) >= known:
            return False
        if len(self._spare) >= self._MOST_SPARE:
            self._spare.clear()
        self._spare[self.key] = self
        return True

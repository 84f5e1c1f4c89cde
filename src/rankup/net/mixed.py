"""Batches whose samples belong to different tasks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from rankup import seeds
from rankup.errors import RankupError
from rankup.layers import active
from rankup.net.tasks import TaskList

Run = Callable[[Any, dict[str, Any]], Any]  # takes inputs and the module's own options

_MOST_TRIALS = 1000  # kinds of calls that are tried: with more, some option must be a counter


@dataclass
class MixedBatches:
    """Answers mixed batches for the tasks of one network.

    A layer compares its number of rows with the number of samples. A module that puts another
    dimension first, of the same size by chance, would pass. So a module is tried once with fewer
    samples for every shape of batch and kind of options it is called with.
    """

    _tasks: TaskList
    _tried: set[Any] = field(default_factory=set)

    def answer(
        self, x: Any, tasks: Tensor, options: dict[str, Any], run: Run, device: torch.device
    ) -> Any:
        """The answer of a module, run by `run` on a device, for a task per sample."""
        known = len(self._tasks.tasks)
        indices, copied = self._checked(tasks, x, device)
        self._try_once(x, indices, options, run)
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

    def _try_once(self, x: Any, tasks: Tensor, options: dict[str, Any], run: Run) -> None:
        samples = len(tasks)
        if samples < 2 or len(self._tried) == _MOST_TRIALS:
            return
        if isinstance(x, Tensor) and not options:  # the usual case, kept fast
            kind: Any = x.shape[1:]
            if kind in self._tried:
                return
            few, few_options = _few_of(x, samples), {}
        else:
            leaves, form = tree_flatten((x, options))
            kind = (str(form), *(_kind(leaf, samples) for leaf in leaves))
            if kind in self._tried:
                return
            few, few_options = tree_unflatten([_few_of(leaf, samples) for leaf in leaves], form)
            if not any(_is_per_sample(leaf, samples) for leaf in leaves):
                self._tried.add(kind)
                return
        _try(few, _few_of(tasks, samples), few_options, run, samples)
        self._tried.add(kind)


def _try(few: Any, tasks: Tensor, options: dict[str, Any], run: Run, samples: int) -> None:
    try:
        with seeds.seeded_rng(tasks.device, 0), torch.no_grad(), active(tasks):
            run(few, options)
    except RankupError as error:
        raise RankupError(
            f"in a trial run with {len(tasks)} samples, before the {samples} of the mixed batch: "
            f"{error}"
        ) from error
    except Exception:
        # Tells nothing: the module may be unable to run on so few, or on a mask that was cut
        # because it happened to be as long as the batch.
        pass


def _few_of(leaf: Any, samples: int) -> Any:
    """Two samples, or three if the batch has two, of a tensor with an entry per sample; any other
    leaf as it is. Never one sample, whose dimension a module may squeeze."""
    if not _is_per_sample(leaf, samples):
        return leaf
    # Copies, because a module may change what it is given.
    return torch.cat([leaf, leaf[:1]]) if samples == 2 else leaf[:2].clone()


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

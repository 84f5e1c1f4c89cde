"""Batches whose samples belong to different tasks."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from rankup import seeds
from rankup.errors import RankupError
from rankup.layers import RowsError, active
from rankup.layers.mixed_call import MixedLayers
from rankup.net.graphs import Graphs
from rankup.net.groups import Arguments, Run, Split, run_by_groups, run_every_task
from rankup.net.tasks import TaskList

_MOST_TRIALS = 1000  # kinds of calls that are remembered

MISSING: Any = object()  # in place of inputs, if all are named


@dataclass
class MixedBatches:
    """Answers mixed batches for the tasks of one network.

    In one pass, if the module allows it, else task after task. A layer compares its number of rows
    with the number of samples. A module that puts another dimension first, of the same size by
    chance, would pass. So a module is tried with fewer samples for every shape of batch and kind of
    options that it is called with. One that folds other dimensions into the batch, as window
    attention does, runs task after task.
    """

    _tasks: TaskList
    layers: MixedLayers
    one_by_one: bool = False  # modules that read a task's tensors run for one task at a time
    _tried: dict[Any, bool] = field(default_factory=dict)  # found by trials, by kind of call
    graphs: Graphs | None = None

    def answer(
        self,
        x: Any,
        tasks: Tensor,
        options: dict[str, Any],
        run: Run,
        device: torch.device,
        split: Split,
    ) -> Any:
        """The answer of a module, run by `run` on a device, for a task per sample."""
        self._refuse_shapes(tasks, x)
        if torch.compiler.is_compiling():
            return self._traced(x, tasks.to(device, torch.long), options, run, split)
        known = len(self._tasks.tasks)
        indices, copied = self._checked(tasks, device)
        if self._runs_in_one_pass(x, indices, options, run, split):
            y = self._in_one_pass(x, indices, options, run)
            if copied is None or copied.all_below(known):
                return y
        elif copied is None or copied.all_below(known):
            return run_by_groups(Arguments(x, options, len(tasks), split), indices, run)
        self._refuse_unknown(copied.indices)  # or the task was committed in the meantime
        return self.answer(x, tasks, options, run, device, split)

    def _in_one_pass(self, x: Any, tasks: Tensor, options: dict[str, Any], run: Run) -> Any:
        def answer(x: Any, options: dict[str, Any], tasks: Tensor) -> Any:
            with active(tasks), self.layers.run_for(tasks):
                return run(x, options)

        if self.graphs is None:
            return answer(x, options, tasks)
        return self.graphs.answer(x, options, tasks, answer)

    def _traced(
        self, x: Any, tasks: Tensor, options: dict[str, Any], run: Run, split: Split
    ) -> Any:
        """For a compiler: nothing here depends on the values of `tasks`, and nothing is tried."""
        if not self.one_by_one:
            try:
                with active(tasks):
                    return run(x, options)
            except RowsError:
                pass
        given = Arguments(x, options, tasks.shape[0], split)
        return run_every_task(given, tasks, len(self._tasks.tasks), run)

    def _refuse_shapes(self, tasks: Tensor, x: Any) -> None:
        if tasks.dim() != 1 or tasks.is_floating_point() or tasks.dtype == torch.bool:
            raise RankupError(
                "the tasks of a mixed batch must be a tensor of one index per sample, got shape "
                f"{list(tasks.shape)} of {tasks.dtype}"
            )
        if isinstance(x, Tensor) and not x.dim():
            raise RankupError("a mixed batch must have a dimension of samples, got a single number")
        if isinstance(x, Tensor) and x.shape[0] != tasks.shape[0]:
            raise RankupError(f"got {len(tasks)} task indices for {len(x)} samples")

    def _checked(self, tasks: Tensor, device: torch.device) -> tuple[Tensor, "HostCopy | None"]:
        """The indices as layers take them. If checking them would mean waiting for the device, they
        are clamped into range, and a copy is returned to be checked afterwards."""
        indices = tasks.to(device, torch.long)
        capturing = indices.is_cuda and torch.cuda.is_current_stream_capturing()
        if not len(tasks) or capturing:
            return indices, None
        known = len(self._tasks.tasks)
        if tasks.is_cuda and indices.is_cuda and known:
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

    def _runs_in_one_pass(
        self, x: Any, tasks: Tensor, options: dict[str, Any], run: Run, split: Split
    ) -> bool:
        """Whether a module takes a mixed batch of this shape and with such options in one pass."""
        if self.one_by_one or not len(tasks):
            return not self.one_by_one
        usual = isinstance(x, Tensor) and not options  # kept fast
        given = None if usual else Arguments(x, options, len(tasks), split)
        kind = given.kind() if given else x.shape[1:]
        if (found := self._tried.get(kind)) is None:
            if len(self._tried) == _MOST_TRIALS:
                self._tried.clear()  # some option must be a counter
            given = given or Arguments(x, options, len(tasks), split)
            found = self._tried[kind] = _takes_one_pass(given, tasks, run)
        return found


def _takes_one_pass(given: Arguments, tasks: Tensor, run: Run) -> bool:
    """Try a module with few samples; raise if it keeps something else than samples in front.

    One that folds other dimensions into the batch has the same multiple of rows for two samples as
    for three, and a layer that runs on what all samples share has one row. Either can run task
    after task.
    """
    if not given.can_be_split:
        return True

    def trial(few: int) -> RowsError | None:
        # The first more than once, if there are not as many. Never one sample, whose dimension a
        # module may squeeze. These are copies, because a module may change what it is given.
        rows = torch.arange(few, device=tasks.device) % given.samples
        return _try(*given.of(rows), tasks[rows], run)

    few, other = (3, 2) if given.samples == 2 else (2, 3)
    error = trial(few)
    if error is None:
        return True
    if (second := trial(other)) is not None:
        is_shared, folds = error.rows == second.rows == 1, error.rows * other == second.rows * few
        if is_shared or folds:
            return False
    raise RankupError(
        f"in a trial run with {few} samples, before the {given.samples} of the mixed batch: {error}"
    ) from error


def _try(inputs: Any, options: dict[str, Any], tasks: Tensor, run: Run) -> RowsError | None:
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

"""Mixed batches: batches whose samples belong to different tasks."""

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

MISSING: Any = object()  # the positional input, if all arguments are passed by name


class MixedBatches:
    """Runs a network's module on mixed batches: in one pass if the module allows it, otherwise for
    one task after another.

    In one pass, each layer compares its number of rows with the number of samples. That is not
    enough: a module may put another dimension first, which is as long by chance. So the module is
    tried with fewer samples for each new shape of batch and kind of options. A module that folds
    other dimensions into the batch, as window attention does, runs for one task after another.

    Args:
        tasks: the network's tasks.
        layers: its layers.
        one_by_one: whether the module can only run for one task at a time.

    Attributes:
        graphs: the CUDA graphs that answer, if `IncrementalNet.capture` has been called.
    """

    def __init__(self, tasks: TaskList, layers: MixedLayers, *, one_by_one: bool) -> None:
        self._tasks, self.layers, self.one_by_one = tasks, layers, one_by_one
        self.graphs: Graphs | None = None
        self._tried: dict[Any, bool] = {}  # by kind of call, whether it can run in one pass

    def answer(
        self,
        x: Any,
        tasks: Tensor,
        options: dict[str, Any],
        run: Run,
        device: torch.device,
        split: Split,
    ) -> Any:
        """The module's output for a task per sample.

        Args:
            x: the module's first argument.
            tasks: `[B]`, the index of each sample's task.
            options: the module's other arguments.
            run: calls the module with `x` and `options`.
            device: where the module runs.
            split: as for calling the network.
        """
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
        self._refuse_unknown(copied.indices)  # returns if the task was committed in the meantime
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
        """For torch.compile: without trials, and without reading the values of `tasks`."""
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
        """The indices on the module's device, checked.

        If checking them would mean waiting for a GPU, they are clamped to valid ones instead, and
        a copy of the given ones is returned, to be checked after the module has run.
        """
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
        """Whether the module can run a mixed batch of this kind in one pass."""
        if self.one_by_one or not len(tasks):
            return not self.one_by_one
        is_plain = isinstance(x, Tensor) and not options  # the usual case, kept fast
        given = None if is_plain else Arguments(x, options, len(tasks), split)
        kind = given.kind() if given else x.shape[1:]
        if (found := self._tried.get(kind)) is None:
            if len(self._tried) == _MOST_TRIALS:
                self._tried.clear()  # probably, some option is different in every call
            given = given or Arguments(x, options, len(tasks), split)
            found = self._tried[kind] = _takes_one_pass(given, tasks, run)
        return found


def _takes_one_pass(given: Arguments, tasks: Tensor, run: Run) -> bool:
    """Whether the module can run a mixed batch in one pass, tried with few samples.

    It cannot, but can run for one task after another, if it folds other dimensions into the batch,
    so that its layers get the same multiple of rows for two samples as for three; or if it runs a
    layer on something that all samples share, which is one row. Raises for any other number of
    rows: the first dimension is then not the samples'.
    """
    if not given.can_be_split:
        return True

    def trial(few: int) -> RowsError | None:
        # Samples are repeated if there are too few. Never a single one, whose dimension a module
        # may squeeze. `of` copies them, because a module may change its inputs.
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
        # This tells nothing: the module may not run on so few samples, or with a mask that was cut
        # only because it happened to be as long as the batch.
        pass
    return None


class HostCopy:
    """Indices that are being copied from a GPU to the host. Reading them waits for the copy, but
    not for what the GPU was given to do after it."""

    # Copies to use again, by device and length, because allocating pinned memory takes longer than
    # copying. Those in use are not among them, so threads and nested calls do not share any.
    _spare: ClassVar[dict[tuple[torch.device, int], "HostCopy"]] = {}
    _MOST_SPARE = 16

    def __init__(self, device: torch.device, count: int) -> None:
        self.key = device, count
        with torch.inference_mode(False):  # else it could not be written to outside of it
            self.indices = torch.empty(count, dtype=torch.long, device="cpu", pin_memory=True)
        self._unsigned = self.indices.numpy().view("uint64")  # negative ones become the largest
        self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @classmethod
    def of(cls, indices: Tensor) -> "HostCopy":
        device, count = indices.device, len(indices)
        copied = cls._spare.pop((device, count), None) or cls(device, count)
        copied.indices.copy_(indices, non_blocking=True)
        copied._there.record(torch.cuda.current_stream(device))
        return copied

    def all_below(self, known: int) -> bool:
        """Whether all indices are from 0 to `known - 1`; if so, this copy may be used again."""
        self._there.synchronize()
        if int(self._unsigned.max()) >= known:
            return False
        if len(self._spare) >= self._MOST_SPARE:
            self._spare.clear()
        self._spare[self.key] = self
        return True

"""Answers to batches whose samples belong to different tasks."""

from typing import Any

import torch
from torch import Tensor

from rankup.errors import RankupError
from rankup.layers import active
from rankup.net.audit import Audit, Run, Uneven
from rankup.net.host_copy import HostCopy
from rankup.net.tasks import TaskList


class MixedBatches:
    """What a network needs for them besides its layers: which tasks there are, and which kinds of
    calls were tried already."""

    def __init__(self, tasks: TaskList) -> None:
        self._tasks = tasks
        self._audit = Audit()

    def answer(
        self,
        x: Any,
        tasks: Tensor,
        options: dict[str, Any],
        run: Run,
        device: torch.device,
        training: bool,
    ) -> Any:
        """The answer of a module, run by `run` on a device, for a task per sample."""
        known = len(self._tasks.tasks)
        indices, copied = self._checked(tasks, x, device)
        # In training mode, answers may depend on more than the sample.
        uneven = None if training or _is_recorded(indices.device) else self._uneven()
        self._audit.check(x, indices, options, run, uneven)
        with active(indices):
            y = run(x, options)
        if copied is None or copied.all_below(known):
            return y
        self._refuse_unknown(copied.indices)  # or the task was committed in the meantime
        return self.answer(x, tasks, options, run, device, training)

    def _checked(
        self, tasks: Tensor, x: Any, device: torch.device
    ) -> tuple[Tensor, HostCopy | None]:
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
        if not len(tasks) or _is_captured(indices.device):
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

    def _uneven(self) -> Uneven | None:
        """The tasks with the fewest and with the most classes, if these differ."""
        narrow, wide = self._tasks.narrowest, self._tasks.widest
        if narrow == wide:
            return None
        return Uneven(narrow, wide, self._tasks.tasks[narrow].classes)


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _is_recorded(device: torch.device) -> bool:
    """Whether the call is being recorded for replay: no number may be read."""
    return torch.compiler.is_compiling() or _is_captured(device)

"""Reading numbers from a GPU without waiting for all its queued work."""

from typing import ClassVar

import torch
from torch import Tensor


class HostCopy:
    """Indices copied to the host. Reading them waits for the copy and what was queued before it,
    not for what was queued after."""

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

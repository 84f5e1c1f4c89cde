"""A cache of tensors that layers compute from constant ones, such as a task's dense weight.

What is cached changes no bits: it is computed in the same way every time, and the form in which a
layer runs does not depend on it.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankup.utils.per_thread import PerThread, set_to

Make = Callable[[], tuple[Tensor, ...]]

_SHARE = 8  # of a GPU's memory: what caches may take of it
_ON_CPU = 1 << 30  # bytes


Key = tuple[int, Hashable]  # a layer's id, and which of its tensors


class _Entry(NamedTuple):
    tensors: tuple[Tensor, ...]
    sources: tuple[Any, ...]  # weak references to what they were computed from, with versions
    bytes: int
    stream: Any  # the CUDA stream on which they were computed
    ready: Any  # the event that other streams wait for


class Cache:
    """Tensors by layer and key. On each device the least recently used ones are dropped once all
    together exceed a limit.

    A CUDA graph goes on reading the tensors that it was captured with. These are kept for as long
    as their layer, or inside of `held` for as long as the list that it gives.
    """

    def __init__(self) -> None:
        self.limit: int | None = None  # bytes on each device; None for a share of its memory
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._captured: dict[int, list[_Entry]] = {}
        self._known: set[int] = set()  # ids of layers that have entries
        self._lock = threading.RLock()

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()

    def of(
        self, layer: object, key: Hashable, sources: Sequence[Tensor], make: Make
    ) -> tuple[Tensor, ...]:
        """The result of `make`, which computes it from `sources`; a cached one, if the sources are
        still the same tensors, unchanged."""
        capturing = sources[0].is_cuda and torch.cuda.is_current_stream_capturing()
        with self._lock:
            entry = self._entries.get((id(layer), key))
            if entry is not None and not _is_made_of(entry, sources):
                entry = None
            if entry is not None:
                self._entries.move_to_end((id(layer), key))
                if capturing:
                    own = _held.value
                    own = self._captured.setdefault(id(layer), []) if own is None else own
                    own.append(entry)
        if entry is not None:
            # A captured stream cannot wait for others, and need not: all work is done before.
            return entry.tensors if capturing else _on_this_stream(entry)
        # Plain constants, even if the caller is in inference mode or records gradients.
        with torch.inference_mode(False), torch.no_grad():
            tensors = make()
        if not capturing:  # else they are in the graph's memory, and have no values until it runs
            self._keep(layer, key, sources, tensors)
        return tensors

    def _keep(
        self, layer: object, key: Hashable, sources: Sequence[Tensor], made: tuple[Tensor, ...]
    ) -> None:
        device, size = made[0].device, sum(tensor.nbytes for tensor in made)
        known = tuple((weakref.ref(tensor), version(tensor)) for tensor in sources)
        entry = _Entry(made, known, size, *_made_on(device))
        with self._lock:
            if id(layer) not in self._known:
                self._known.add(id(layer))
                weakref.finalize(layer, self._drop, id(layer))
            self._entries[id(layer), key] = entry
            self._shrink(device)

    def _shrink(self, device: torch.device) -> None:
        there = {k: e.bytes for k, e in self._entries.items() if e.tensors[0].device == device}
        excess = sum(there.values()) - self._limit(device)
        for key, size in there.items():  # the least recently used ones first
            if excess <= 0:
                return
            del self._entries[key]
            excess -= size

    def _drop(self, layer: int) -> None:
        with self._lock:
            self._known.discard(layer)
            self._captured.pop(layer, None)
            for key in [key for key in self._entries if key[0] == layer]:
                del self._entries[key]

    def _limit(self, device: torch.device) -> int:
        if self.limit is not None:
            return self.limit
        if device.type == "cuda":
            return int(torch.cuda.get_device_properties(device).total_memory // _SHARE)
        return _ON_CPU


def _is_made_of(entry: _Entry, sources: Sequence[Tensor]) -> bool:
    pairs = zip(entry.sources, sources, strict=True)
    return all(ref() is tensor and was == version(tensor) for (ref, was), tensor in pairs)


def version(tensor: Tensor) -> int:
    """How often a tensor was modified in place; 0 for inference tensors, which do not count."""
    return 0 if tensor.is_inference() else tensor._version


def _made_on(device: torch.device) -> tuple[Any, Any]:
    if device.type != "cuda":
        return None, None
    stream = torch.cuda.current_stream(device)
    return stream, stream.record_event()


def _on_this_stream(entry: _Entry) -> tuple[Tensor, ...]:
    if entry.stream is not None:
        stream = torch.cuda.current_stream(entry.tensors[0].device)
        if stream != entry.stream:
            stream.wait_event(entry.ready)
            for tensor in entry.tensors:
                tensor.record_stream(stream)
    return entry.tensors


@contextmanager
def held() -> Iterator[list[Any]]:
    """Inside, only the list given keeps the tensors that a CUDA graph is captured with."""
    entries: list[Any] = []
    with set_to(_held, entries):
        yield entries


_held = PerThread[list[Any]]()
CACHE = Cache()  # of all networks of the process

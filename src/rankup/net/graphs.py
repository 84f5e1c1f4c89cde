"""Mixed batches by CUDA graphs: if there was a batch of the same shape before, the host starts one
graph instead of every operation."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from rankup import seeds
from rankup.layers import cached
from rankup.layers.task_context import notes_head_inputs

Pass = Callable[[Any, dict[str, Any], Tensor], Any]  # runs inputs, options and tasks in one pass

_MOST_SEEN = 1000  # kinds of calls that are remembered


class Graphs:
    """The graphs of a network, one for each kind of call: shapes, dtypes, options and autocast.

    A kind is captured when it comes for the second time. Graphs read the tensors that they were
    captured with. Once one of these is replaced or modified, as by a commit, all graphs are
    dropped, which also frees the old tensors. Graphs share their memory, so only one runs at a
    time.

    Args:
        body: the network's module.
        most: how many graphs there are at once; the least recently used are dropped.
    """

    def __init__(self, body: nn.Module, most: int) -> None:
        self.body, self.most = body, most
        self._modules = [*body.modules()]
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()  # the least recently used first
        self._sources: list[tuple[Tensor, int]] = []  # the tensors that graphs read, with versions
        self._seen: dict[Hashable, bool] = {}  # for kinds that came before, whether to capture them
        self._lock = threading.Lock()
        self._memory: Any = None  # a pool and the stream that captures
        self._done: Any = None  # the event after the last replay

    def __reduce__(self) -> Any:  # a copy captures graphs of its own
        return Graphs, (self.body, self.most)

    def answer(self, x: Any, options: dict[str, Any], tasks: Tensor, run: Pass) -> Any:
        """The output of `run`, by a graph if possible."""
        leaves, form = tree_flatten((x, options))
        if not self._allows(leaves, tasks):
            return run(x, options, tasks)
        kind = (str(form), *map(_kind, leaves), len(tasks), *_modes(tasks.device))
        if not self._was_seen(kind):
            return run(x, options, tasks)
        with self._lock:
            graph = self._graphs.pop(kind, None)
            # Whether it is stale is checked while it runs, as all that it reads is still alive.
            answer = None if graph is None else self._replay(graph, leaves, tasks)
            if self._is_stale():
                graph = answer = None  # frees their memory for the next graphs
                self._graphs.clear()
            if graph is None:
                try:
                    graph = self._capture(leaves, form, tasks, run)
                except Exception as error:  # a module's own code: it may wait for the device
                    self._seen[kind] = False
                    reason = (str(error).splitlines() or [type(error).__name__])[0]
                    warnings.warn(f"answers without a CUDA graph: {reason}", stacklevel=2)
                    return run(x, options, tasks)
                answer = self._replay(graph, leaves, tasks)
            self._graphs[kind] = graph
            while len(self._graphs) > self.most:
                self._graphs.popitem(last=False)
            return answer

    def _allows(self, leaves: Sequence[Any], tasks: Tensor) -> bool:
        constants = str, int, float, type(None)
        return (
            can_capture(tasks)
            and not torch.is_grad_enabled()
            and not self.body.training
            and not notes_head_inputs()
            and all(
                leaf.device == tasks.device if isinstance(leaf, Tensor) else type(leaf) in constants
                for leaf in leaves
            )
        )

    def _was_seen(self, kind: Hashable) -> bool:
        if kind in self._seen:
            return self._seen[kind]
        if len(self._seen) == _MOST_SEEN:
            self._seen.clear()
        self._seen[kind] = True
        return False

    def _is_stale(self) -> bool:
        """Whether the network's tensors are others than when graphs were captured. If so, remember
        the new ones."""
        buffers = (t for module in self._modules for t in module._buffers.values())
        tensors = [tensor for tensor in buffers if tensor is not None]
        if len(tensors) == len(self._sources) and all(
            tensor is source and cached.version(tensor) == version
            for tensor, (source, version) in zip(tensors, self._sources, strict=True)
        ):
            return False
        self._sources = [(tensor, cached.version(tensor)) for tensor in tensors]
        return True

    def _capture(self, leaves: Sequence[Any], form: Any, tasks: Tensor, run: Pass) -> _Graph:
        with torch.inference_mode(False), torch.no_grad():
            if not self._graphs:  # torch refuses a pool once all of its graphs are gone
                self._memory = new_memory(tasks.device)
            return _Graph(leaves, form, tasks, run, self._memory)

    def _replay(self, graph: _Graph, leaves: Sequence[Any], tasks: Tensor) -> Any:
        stream = torch.cuda.current_stream(tasks.device) if tasks.is_cuda else None
        if stream is not None and self._done is not None:
            stream.wait_event(self._done)
        answer = graph(leaves, tasks)
        self._done = None if stream is None else stream.record_event()
        return answer


class _Graph:
    def __init__(
        self, leaves: Sequence[Any], form: Any, tasks: Tensor, run: Pass, memory: Any
    ) -> None:
        self._inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._tasks = tasks.clone()
        x, options = tree_unflatten(self._inputs, form)
        with cached.held() as self._held:  # cached tensors that the graph reads
            self._start, self._answer = record(lambda: run(x, options, self._tasks), tasks, memory)

    def __call__(self, leaves: Sequence[Any], tasks: Tensor) -> Any:
        for own, given in zip((*self._inputs, self._tasks), (*leaves, tasks), strict=True):
            if isinstance(own, Tensor):
                own.copy_(given)
        self._start()
        return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, self._answer)


def can_capture(tasks: Tensor) -> bool:
    return tasks.is_cuda and not torch.cuda.is_current_stream_capturing()


def new_memory(device: torch.device) -> Any:
    return torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def record(call: Callable[[], Any], tasks: Tensor, memory: Any) -> tuple[Callable[[], None], Any]:
    """Capture a call. Returns what replays it, and the output, which a replay overwrites."""
    device, kind = tasks.device, tasks.device.type
    (pool, stream), graph = memory, torch.cuda.CUDAGraph()
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    with torch.cuda.device(device), torch.autocast(kind, dtype, enabled, cache_enabled=False):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries initialise in their first call
            call()
        torch.cuda.current_stream().wait_stream(stream)
        with (
            seeds.rng_restored_on_error(device),
            torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"),
        ):
            answer = call()
    return graph.replay, answer


def _kind(leaf: Any) -> Hashable:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), str(leaf))


def _modes(device: torch.device) -> tuple[Hashable, ...]:
    """Global modes that change what operations compute."""
    return (
        torch.is_autocast_enabled(device.type),
        torch.get_autocast_dtype(device.type),
        torch.backends.cuda.matmul.fp32_precision,
        torch.are_deterministic_algorithms_enabled(),
    )

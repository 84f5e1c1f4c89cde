"""A queue in front of a network: requests that arrive together run as one mixed batch."""

import asyncio
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from rankup.errors import RankupError

AnyFuture = Any  # of concurrent.futures, or of asyncio
Network = Callable[..., Any]  # net(x, task=…), with one name for all samples or a list of names


class QueueFull(RankupError):
    """The queue is full: ask again later."""


class Closed(RankupError):
    """The queue takes no more requests."""


# Either (input, task, future, None), or (inputs [N, …], N tasks, one future for all, N). A plain
# tuple, since making these objects is a good part of the time that an input takes.
_Request = tuple[Tensor, Any, AnyFuture, int | None]


class Batcher:
    """Runs requests for different tasks together, in a thread of its own or on an event loop.

    A batch starts when it is full, or when its oldest request has waited for `wait_ms`; inputs of
    different shapes that arrive together run one shape after another. If a batch fails, its
    requests are run one by one, so that only those that cause the error fail.

    Args:
        net: called as `net(x, task=…)`, with one task's name or a list of a name per sample. It
            may be replaced at any time: `batcher.net = other`.
        most: the most inputs in a batch.
        wait_ms: milliseconds that a request waits for others.
        longest_queue: how many inputs may wait; one more raises `QueueFull`.
        finish: converts a batch's logits to a list with a result for each sample.
        loop: the event loop that awaits the results, which it gets once per batch. Without a loop,
            requests may come from any thread, and get futures of `concurrent.futures`.
        inline: whether to run batches on the loop itself instead of in a thread, which blocks the
            loop meanwhile. For a network that takes far less than a millisecond, so that switching
            between threads does not delay its batches.
        device: where batches are moved to; None to leave them where they are.
        on_batch: called with the number of inputs of each batch.

    >>> import rankup
    >>> net = rankup.grow(rankup.models.mlp(4, hidden=[8]), rankup.Rank(2, 1))
    >>> for name in ("cats", "dogs"):
    ...     net.begin_task(name, classes=3)
    ...     net.commit_task()
    >>> with Batcher(net.eval()) as batcher:
    ...     answers = [batcher.submit(torch.ones(4), task) for task in ("cats", "dogs", "cats")]
    ...     [answer.result().shape for answer in answers]
    [torch.Size([3]), torch.Size([3]), torch.Size([3])]
    """

    def __init__(
        self,
        net: Network,
        most: int = 64,
        wait_ms: float = 2.0,
        longest_queue: int = 1024,
        *,
        finish: Callable[[Tensor], Sequence[Any]] = Tensor.unbind,
        loop: asyncio.AbstractEventLoop | None = None,
        inline: bool = False,
        device: torch.device | str | None = None,
        on_batch: Callable[[int], None] | None = None,
    ) -> None:
        if most < 1 or wait_ms < 0 or longest_queue < 1:
            raise RankupError(
                "a queue needs batches of at least 1, a wait of at least 0 and room for at least "
                f"1 request, got {most}, {wait_ms} and {longest_queue}"
            )
        self.net, self.most, self.wait, self.longest = net, most, wait_ms / 1000, longest_queue
        self._finish, self._loop, self._on_batch = finish, loop, on_batch
        self._device = device
        self._waiting: deque[_Request] = deque()
        self._count = 0  # inputs that wait
        self._oldest = 0.0  # when the first of the waiting requests came
        self._changed = threading.Condition()
        self._closed = False
        self._due: asyncio.Handle | None = None  # when the next batch runs on the loop
        self._thread = None
        if not inline:
            self._thread = threading.Thread(target=self._serve, name="rankup-batches", daemon=True)
            self._thread.start()
        elif loop is None:
            raise RankupError("a queue without a thread needs an event loop to run on")

    def __len__(self) -> int:
        """How many inputs wait."""
        return self._count

    def submit(self, x: Tensor, task: str) -> AnyFuture:
        """Submit one input, without a dimension of samples, for a task. The future's result is the
        task's logits, `[classes]`, or what `finish` returns for them. In a mixed batch all logits
        are as long as the widest task's, with −inf for classes that a task does not have."""
        future: AnyFuture = Future() if self._loop is None else self._loop.create_future()
        self._submit((x, task, future, None), 1)
        return future

    def submit_many(self, x: Tensor, tasks: Sequence[str]) -> AnyFuture:
        """Submit inputs `[N, …]`, each with its own task, with the overhead of one request. The
        future's result is a list of what `submit` gives for each. They succeed or fail together."""
        if not len(tasks) or len(x) != len(tasks):
            raise RankupError(f"got {len(tasks)} tasks for {len(x)} inputs, expected one for each")
        future: AnyFuture = Future() if self._loop is None else self._loop.create_future()
        self._submit((x, list(tasks), future, len(tasks)), len(tasks))
        return future

    def _submit(self, request: _Request, samples: int) -> None:
        if self._thread is None:  # needs no lock: only the loop's thread submits
            first, full = self._add(request, samples)
            if first or full:
                self._plan(full)
            return
        with self._changed:
            if any(self._add(request, samples)):  # the thread has to plan a batch, or to run one
                self._changed.notify()

    def _add(self, request: _Request, samples: int) -> tuple[bool, bool]:
        """Add a request to the queue; returns whether it is the only one that waits, and whether it
        makes a batch full."""
        before = self._count
        if self._closed:
            raise Closed("the server is shutting down: ask again later")
        if before + samples > self.longest:
            raise QueueFull(
                f"at most {self.longest} inputs wait at once, and {before} do already: ask later"
            )
        self._waiting.append(request)
        self._count = before + samples
        if not before:
            self._oldest = time.monotonic()
        return not before, before < self.most <= before + samples

    def close(self) -> None:
        """Answer waiting requests, then end. Later requests raise `Closed`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        while self._waiting:  # without a thread
            self._process(self._take_batch())

    def __enter__(self) -> "Batcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _plan(self, full: bool) -> None:
        """Schedule a batch on the loop: at once if it is full, else after the time to wait."""
        assert self._loop is not None
        if not full:
            self._due = self._loop.call_later(self.wait, self._run_due)
            return
        if self._due is not None:
            self._due.cancel()
        self._due = self._loop.call_soon(self._run_due)

    def _run_due(self) -> None:
        assert self._loop is not None
        batch = self._take_batch()
        if self._waiting:
            self._due = self._loop.call_soon(self._run_due)
        self._process(batch)

    def _serve(self) -> None:
        while batch := self._wait_for_batch():
            self._process(batch)

    def _wait_for_batch(self) -> list[_Request]:
        """The next batch, once it is due; empty when the queue is closed and nothing waits."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            due = self._oldest + self.wait
            while self._count < self.most and not self._closed:
                if (left := due - time.monotonic()) <= 0:
                    break
                self._changed.wait(left)
            # Requests that are left wait anew, which delays them by one batch at most.
            self._oldest = time.monotonic()
            return self._take_batch()

    def _take_batch(self) -> list[_Request]:
        """Take as many requests from the queue as fit into a batch, at least one if any wait."""
        if self._count == len(self._waiting) <= self.most:  # all, if each has one input
            taken = list(self._waiting)
            self._waiting.clear()
            self._count = 0
            return taken
        taken, room = [], self.most
        while self._waiting and (not taken or (self._waiting[0][3] or 1) <= room):
            taken.append(self._waiting.popleft())
            room -= taken[-1][3] or 1
        self._count -= self.most - room
        return taken

    def _process(self, batch: Sequence[_Request]) -> None:
        alike: dict[Any, list[_Request]] = defaultdict(list)
        samples = 0
        for request in batch:
            x, _, future, several = request
            samples += several or 1
            if not future.cancelled():  # else nobody waits for its answer
                alike[x.shape if several is None else x.shape[1:], x.dtype].append(request)
        if self._on_batch is not None:
            self._on_batch(samples)
        for requests in alike.values():
            self._deliver(requests, self._answers(requests))

    def _answers(self, requests: Sequence[_Request]) -> Sequence[Any]:
        try:
            return self._run(requests)
        except Exception as error:
            if len(requests) == 1:
                return [error]
            return [answer for request in requests for answer in self._answers([request])]

    @torch.inference_mode()
    def _run(self, requests: Sequence[_Request]) -> Sequence[Any]:
        inputs, tasks, _, counts = zip(*requests, strict=True)
        if not any(counts):
            return self._rows(torch.stack(inputs), list(tasks))
        given = [x if n else x[None] for x, n in zip(inputs, counts, strict=True)]
        x = given[0] if len(given) == 1 else torch.cat(given)
        names = [name for of, n in zip(tasks, counts, strict=True) for name in (of if n else [of])]
        rows = iter(self._rows(x, names))
        return [list(islice(rows, n)) if n else next(rows) for n in counts]

    def _rows(self, x: Tensor, names: list[str]) -> Sequence[Any]:
        """The results of `finish` for samples `[N, …]`, which are run in pieces if they do not fit
        into a batch."""
        if len(names) > (most := self.most):
            starts = range(0, len(names), most)
            pieces = [self._rows(x[at : at + most], names[at : at + most]) for at in starts]
            return [row for piece in pieces for row in piece]
        # With a single task the answers are exactly those of `net(x, task=name)`.
        task = names[0] if len(set(names)) == 1 else names
        x = x if self._device is None else x.to(self._device)
        return self._finish(logits_of(self.net(x, task=task)))

    def _deliver(self, requests: Sequence[_Request], answers: Sequence[Any]) -> None:
        if self._loop is None or self._thread is None:
            _resolve(requests, answers)
            return
        with suppress(RuntimeError):  # the loop has ended, so nobody waits
            self._loop.call_soon_threadsafe(_resolve, requests, answers)


def _resolve(requests: Sequence[_Request], answers: Sequence[Any]) -> None:
    for (_, _, future, _), answer in zip(requests, answers, strict=True):
        if future.done():  # its caller has gone
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


def logits_of(answer: Any) -> Tensor:
    """The logits in a module's output: a tensor, or an object with the attribute `logits`."""
    logits = answer if isinstance(answer, Tensor) else getattr(answer, "logits", None)
    if not isinstance(logits, Tensor):
        raise RankupError(
            f"the network answers with a {type(answer).__name__}, expected a tensor of logits"
        )
    return logits

"""Running work in several processes, which report progress and do not outlive their parent."""

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.queues import SimpleQueue
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from rankup.errors import RankupError, plain_warnings
from rankup.utils.signals import undisturbed

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")

_LISTEN = 0.1  # seconds between checks for messages

_messages: "Outbox"  # in a worker: to its parent


class Outbox(Protocol):
    def put(self, message: Any, /) -> None: ...


def tell(message: Any) -> None:
    """Send a message from a worker to its parent."""
    _messages.put(message)


def begin_worker(messages: Outbox) -> None:
    """Make this process a worker with one thread, which sends its messages to `messages`."""
    global _messages
    _messages = messages
    plain_warnings()

    import torch  # only now, because it is slow

    torch.set_num_threads(1)


class ProcessPool:
    """A context manager with processes that start when they are first needed, and then wait for
    more work until the block ends. An error or interrupt ends them; the next work starts others.

    Args:
        count: the largest number of processes, each with one thread; by default one per core.
    """

    def __init__(self, count: int | None = None) -> None:
        self.count = count or cores()
        self._started: _Started | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._kill()  # none of them is busy

    def run(
        self,
        work: Callable[[Item], Outcome],
        items: Sequence[Item],
        *,
        hear: Callable[[Any], None],
        lost: str,
    ) -> Generator[tuple[Item, Outcome], None, None]:
        """Run `work` on all items, and yield each with its result as it is done. The first error
        ends all work.

        Args:
            hear: called with the messages that workers send by `tell`.
            lost: the error message if a worker was killed.
        """
        try:
            with undisturbed():  # this starts processes
                self._started = self._started or _Started.of(self.count)
                executor, messages = self._started
                pending = {executor.submit(call, work, item): item for item in items}
            while pending:
                done, _ = wait(pending, _LISTEN, FIRST_COMPLETED)
                while not messages.empty():
                    hear(messages.get())
                for future in done:
                    yield pending.pop(future), future.result()
        except BaseException as error:
            self._kill()
            if isinstance(error, BrokenProcessPool):
                raise RankupError(lost) from None
            raise

    def _kill(self) -> None:
        """End workers at once, even busy ones, because their folders are always consistent."""
        if self._started is None:
            return
        with undisturbed():
            executor, self._started = self._started.executor, None
            for process in list((executor._processes or {}).values()):
                process.kill()
            executor.shutdown(cancel_futures=True)


class _Started(NamedTuple):
    executor: ProcessPoolExecutor
    messages: SimpleQueue[Any]

    @classmethod
    def of(cls, count: int) -> Self:
        context = multiprocessing.get_context("spawn")
        messages = context.SimpleQueue()
        return cls(ProcessPoolExecutor(count, context, _begin, (messages,)), messages)


def in_processes(
    work: Callable[[Item], Outcome],
    items: Sequence[Item],
    count: int,
    *,
    hear: Callable[[Any], None],
    lost: str,
) -> Generator[tuple[Item, Outcome], None, None]:
    """Like `ProcessPool.run`, with processes that end when the work is done."""
    with ProcessPool(count) as pool:
        yield from pool.run(work, items, hear=hear, lost=lost)


def cores() -> int:
    """The number of cores that this process may use, or that the machine has."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def _begin(messages: SimpleQueue[Any]) -> None:
    # Ctrl-C reaches every process of a terminal; it is up to the parent to end the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    begin_worker(messages)


def _end_with_parent() -> None:
    """Exit when the parent does, which cannot end its workers if it is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def call(work: Callable[[Item], Outcome], item: Item) -> Outcome:
    """Run `work` on an item. Errors are replaced by ones that can be sent to another process."""
    try:
        return work(item)
    except Exception as error:
        if (sent := sendable(error)) is not error:
            raise sent from error
        raise


def sendable(error: Exception) -> Exception:
    """The error itself if it can be pickled, or one with the same message. An error that cannot
    be pickled would look like a killed worker."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error

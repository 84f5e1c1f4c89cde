"""Work in several processes, which tell how far they are and do not outlive who asked for it."""

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from rankup.errors import RankupError, plain_warnings

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")

_told: Any = None  # in a worker: the queue to the one that asked


def tell(message: Any) -> None:
    """From a worker to the one that asked."""
    _told.put(message)


def in_processes(
    work: Callable[[Item], Outcome],
    items: Sequence[Item],
    count: int,
    *,
    hear: Callable[[Any], None],
    lost: str,
) -> Generator[tuple[Item, Outcome], None, None]:
    """Each item and what its work came to, as they are done.

    Args:
        count: how many processes, each with one thread.
        hear: is given what workers `tell`.
        lost: what to say when a worker was killed.
    """
    context, others = multiprocessing.get_context("spawn"), {*multiprocessing.active_children()}
    told: Any = context.Queue()
    pool = ProcessPoolExecutor(min(count, len(items)), context, _begin, (told,))
    try:
        pending = {pool.submit(work, item): item for item in items}
        while pending:
            with contextlib.suppress(queue.Empty):
                hear(told.get(timeout=0.1))
            for done in [future for future in pending if future.done()]:
                yield pending.pop(done), done.result()
        pool.shutdown()
    except BaseException as error:
        # Workers that are in the middle of something must not outlive this process. A folder is
        # whole at every moment.
        for process in {*multiprocessing.active_children()} - others:
            process.terminate()
        pool.shutdown(cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise RankupError(lost) from None
        raise


def _begin(told: Any) -> None:
    import torch

    global _told
    _told = told
    # Ctrl-C reaches every process of a terminal; it is the parent's to end the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    plain_warnings()
    torch.set_num_threads(1)


def _end_with_parent() -> None:
    """A parent that is killed cannot end its workers: they see to it themselves."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)

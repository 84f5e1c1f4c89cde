"""Work in several processes, which report their progress and do not outlive their parent.

The parent needs only one thread and no lock for this: an interrupt may come at any line, even while
a lock is held, and then ending the workers must not wait for that lock.
"""

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, TypeVar, cast

from rankup.errors import RankupError, plain_warnings
from rankup.utils.signals import undisturbed

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


class _Told(NamedTuple):
    message: Any


class _Done(NamedTuple):
    outcome: Any


class _Failed(NamedTuple):
    error: BaseException
    where: str  # its traceback, which is not pickled with it


class _InWorker(Exception):
    """The traceback of an error in a worker, shown above the parent's."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class _WorkerLost(Exception):
    pass


class _Worker(NamedTuple):
    process: SpawnProcess
    line: Connection  # sends jobs and receives messages


# In a worker: the line to the parent, for one message at a time.
_line: Connection
_speaking = threading.Lock()


def tell(message: Any) -> None:
    """Send a message from a worker to its parent."""
    _say(_Told(message))


def in_processes(
    work: Callable[[Item], Outcome],
    items: Sequence[Item],
    count: int,
    *,
    hear: Callable[[Any], None],
    lost: str,
) -> Generator[tuple[Item, Outcome], None, None]:
    """Each item and the outcome of its work, as they are done.

    Args:
        count: how many processes, each with one thread.
        hear: called with what workers `tell`.
        lost: the error message if a worker was killed.
    """
    workers: list[_Worker] = []
    try:
        for _ in range(min(count, len(items))):
            _start(workers)
        left = deque(items)
        busy: dict[Connection, Item] = {}
        for worker in workers:
            busy[worker.line] = left.popleft()
            _ask(worker.line, work, busy[worker.line])
        while busy:
            for line in cast("list[Connection]", wait([*busy])):
                said = _listen(line)
                if isinstance(said, _Told):
                    hear(said.message)
                    continue
                if isinstance(said, _Failed):
                    raise said.error from _InWorker(said.where)
                done = busy.pop(line)
                if left:
                    busy[line] = left.popleft()
                    _ask(line, work, busy[line])
                yield done, said.outcome
        _let_go(workers)
    except BaseException as error:
        # Busy workers must not outlive this process. They can be killed because their folders are
        # consistent at every moment.
        _kill(workers)
        if isinstance(error, _WorkerLost):
            raise RankupError(lost) from None
        raise


def _start(workers: list[_Worker]) -> None:
    context = multiprocessing.get_context("spawn")
    # An interrupt in between would leave an unknown process behind.
    with undisturbed():
        line, its_line = context.Pipe()
        process = context.Process(target=_serve, args=(its_line,))
        process.start()
        its_line.close()  # so that the line ends with the worker
        workers.append(_Worker(process, line))


def _ask(line: Connection, work: Callable[[Item], Any], item: Item) -> None:
    job = ForkingPickler.dumps((work, item))
    try:
        line.send_bytes(job)
    except OSError:
        raise _WorkerLost from None


def _listen(line: Connection) -> _Told | _Done | _Failed:
    try:
        said = line.recv_bytes()
    except (EOFError, OSError):
        raise _WorkerLost from None
    heard: _Told | _Done | _Failed = pickle.loads(said)
    return heard


def _let_go(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.line.close()
    for worker in workers:
        worker.process.join()


def _kill(workers: list[_Worker]) -> None:
    try:
        with undisturbed():
            for worker in workers:
                worker.process.kill()  # SIGTERM would not end one that is stopped
            _let_go(workers)
    except KeyboardInterrupt:
        _kill(workers)  # Ctrl-C again, maybe before any of this was done
        raise


def _serve(line: Connection) -> None:
    """The main loop of a worker: job after job."""
    _begin(line)
    while True:
        try:
            job = line.recv_bytes()
        except (EOFError, OSError):  # there are no more
            return
        said = _outcome(job)
        try:
            _say(said)
        except Exception as error:  # the outcome cannot be pickled
            _say(_failed(error))


def _begin(line: Connection) -> None:
    global _line
    _line = line
    # Ctrl-C reaches every process of a terminal; it is up to the parent to end the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    plain_warnings()

    import torch  # only now, because it is slow

    torch.set_num_threads(1)


def _outcome(job: bytes) -> _Done | _Failed:
    try:
        work, item = pickle.loads(job)
        return _Done(work(item))
    except BaseException as error:
        return _failed(error)


def _failed(error: BaseException) -> _Failed:
    where = "".join(traceback.format_exception(error))
    try:
        pickle.loads(ForkingPickler.dumps(error))
    except Exception:  # it cannot be pickled; its message can
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return _Failed(error, where)


def _say(said: _Told | _Done | _Failed) -> None:
    message = ForkingPickler.dumps(said)
    try:
        with _speaking:
            _line.send_bytes(message)
    except OSError:  # nobody is left to hear it
        os._exit(1)


def _end_with_parent() -> None:
    """Exit when the parent does: one that is killed cannot end its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)

"""Something happens at the n-th call that changes a disk: the process dies, or the disk is full."""

import errno
import io
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import rankup.storage.atomic as atomic

WRITING = ("fsync", "replace", "mkdir")  # can fail for want of room
CHANGING = (*WRITING, "close", "unlink")


class Moment:
    """Counts calls, and acts at one of them."""

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        self.left, self.act = number, act

    def passes(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.act()

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.passes()
            return function(*args, **kwargs)

        return wrapped

    def opening(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            reads = not set(mode) & set("wax")
            # What a command says goes to temporary files, on another disk.
            if reads or "opener" in kwargs or file in (1, 2):
                return function(file, mode, *args, **kwargs)
            self.passes()
            return _File(function(file, mode, *args, **kwargs), self)

        return opened


class _File:
    """Half of what is written reaches the disk before the moment, half after it."""

    def __init__(self, file: Any, moment: Moment) -> None:
        self._file, self._moment = file, moment

    def __enter__(self) -> "_File":
        self._file.__enter__()
        return self

    def __exit__(self, *reason: Any) -> Any:
        return self._file.__exit__(*reason)

    def write(self, content: Any) -> None:
        half = len(content) // 2
        self._file.write(content[:half])
        self._file.flush()
        self._moment.passes()
        self._file.write(content[half:])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def at_call(
    number: int, act: Callable[[], None], calls: tuple[str, ...] = CHANGING
) -> Iterator[Moment]:
    """Inside, `act` is called at the n-th call that opens a file, writes to it, or is listed."""
    moment = Moment(number, act)
    before = {name: getattr(os, name) for name in calls}
    opened = io.open
    for name, function in before.items():
        setattr(os, name, moment.before(function))
    io.open = moment.opening(opened)  # that of pathlib
    atomic.open = moment.opening(opened)
    try:
        yield moment
    finally:
        for name, function in before.items():
            setattr(os, name, function)
        io.open = opened
        del atomic.open


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def any_moment(draw: random.Random, most: int) -> int:
    """Small numbers are drawn as often as large ones."""
    return int(most ** draw.random())

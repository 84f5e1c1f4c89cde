"""Blocks of code that Ctrl-C must not interrupt."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def undisturbed() -> Iterator[None]:
    """Defer Ctrl-C and SIGTERM until the end of the block."""
    received: list[int] = []
    handlers: dict[int, Callable[[int, Any], Any]] = {}
    if threading.current_thread() is threading.main_thread():  # others are never interrupted
        for which in (signal.SIGINT, signal.SIGTERM):
            if callable(handler := signal.getsignal(which)):
                handlers[which] = handler
    try:
        # On a stack, because a restored handler may interrupt restoring the other.
        with ExitStack() as restore:
            for number, handler in handlers.items():
                restore.callback(signal.signal, number, handler)
                signal.signal(number, lambda number, _: received.append(number))
            yield
    finally:
        for number in received[:1]:
            handlers[number](number, None)

"""What Ctrl-C must not interrupt."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def undisturbed() -> Iterator[None]:
    """Defer Ctrl-C and SIGTERM until the end of the block."""
    came: list[int] = []
    handlers: dict[int, Callable[[int, Any], Any]] = {}
    if threading.current_thread() is threading.main_thread():  # others are never interrupted
        for one in (signal.SIGINT, signal.SIGTERM):
            if callable(handler := signal.getsignal(one)):
                handlers[one] = handler
    try:
        # On a stack, because a restored handler may interrupt restoring the other.
        with ExitStack() as put_back:
            for number, handler in handlers.items():
                put_back.callback(signal.signal, number, handler)
                signal.signal(number, lambda which, _: came.append(which))
            yield
    finally:
        for number in came[:1]:
            handlers[number](number, None)

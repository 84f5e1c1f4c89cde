"""Values that reach a call's depths without being passed on, each thread's own."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Value = TypeVar("Value")


class PerThread(threading.local, Generic[Value]):
    """A value that every thread sets for itself; None where it was not set. Not a ContextVar,
    which torch.compile cannot trace."""

    def __init__(self) -> None:  # runs once in every thread
        self.value: Value | None = None


@contextmanager
def set_to(variable: PerThread[Value], value: Value | None) -> Iterator[None]:
    """Inside, in this thread alone, a variable has this value."""
    before = variable.value
    variable.value = value
    try:
        yield
    finally:
        variable.value = before

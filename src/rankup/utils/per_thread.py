"""Values that reach a call's depths without being passed on, each thread's own."""

import threading
from typing import Any, Generic, TypeVar

from rankup.utils.compiling import run_as_it_is

Value = TypeVar("Value")


class PerThread(threading.local, Generic[Value]):
    """A value that every thread sets for itself; None where it was not set. Not a ContextVar,
    which torch.compile cannot trace."""

    def __init__(self) -> None:  # runs once in every thread
        self.value: Value | None = None


class set_to(Generic[Value]):
    """Inside, in this thread alone, a variable has this value. Not a generator, which torch.compile
    could not skip."""

    @run_as_it_is
    def __init__(self, variable: PerThread[Value], value: Value | None) -> None:
        self.variable, self.value = variable, value

    @run_as_it_is
    def __enter__(self) -> None:
        self.before, self.variable.value = self.variable.value, self.value

    @run_as_it_is
    def __exit__(self, *_: Any) -> None:
        self.variable.value = self.before

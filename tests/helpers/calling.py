"""The command line, called in the test's own process: a new one takes seconds to start."""

from collections.abc import Callable
from typing import NamedTuple


class Done(NamedTuple):
    code: int
    out: str
    err: str


Call = Callable[..., Done]

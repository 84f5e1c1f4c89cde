"""The command line, called in a test's own process: others take seconds to start."""

from collections.abc import Callable
from typing import NamedTuple


class Done(NamedTuple):
    code: int
    out: str
    err: str


Call = Callable[..., Done]

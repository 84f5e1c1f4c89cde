"""Ways to learn a stream: the rank update and its rivals. Each is one short file that registers
itself; `METHODS` lists them without loading any."""

from importlib import import_module
from typing import TYPE_CHECKING

from rankup.errors import RankupError

if TYPE_CHECKING:
    from rankup.methods.base import Method

# Name, home and one line of help. A new method adds its line here and its file beside this one.
METHODS: dict[str, tuple[str, str]] = {
    "rank": (
        "rank:RankUpdate",
        "a little rank and a selector per task: never forgets",
    ),
    "finetune": (
        "finetune:FineTune",
        "one dense network trained on and on; forgets",
    ),
}


def method_class(name: str) -> "type[Method]":
    """The class of a method.

    >>> method_class("rank").__name__
    'RankUpdate'
    """
    if name not in METHODS:
        raise RankupError(f"there is no method {name!r}, only {', '.join(METHODS)}")
    home, _, attribute = METHODS[name][0].partition(":")
    found: type[Method] = getattr(import_module(f"rankup.methods.{home}"), attribute)
    return found

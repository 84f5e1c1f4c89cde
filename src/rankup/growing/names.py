"""Names of many layers or parameters, shortened for messages."""

import re
from collections.abc import Iterable

_MOST_NAMES = 8
_MOST_LETTERS = 48  # of each


def starred(name: str) -> str:
    """A name with stars in place of numbers, which is the same for all blocks of a module.

    >>> starred("blocks.0.experts.up[3]")
    'blocks.*.experts.up[*]'
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)|(?<=\[)\d+(?=\]$)", "*", name)


def folded(names: Iterable[str]) -> str:
    """A short list of names, for an error or a warning.

    >>> folded(["blocks.0.norm.weight", "blocks.1.norm.weight", "pos"])
    'blocks.*.norm.weight, pos'
    """
    patterns = dict.fromkeys(map(starred, names))
    shown = ", ".join(_clipped(pattern) for pattern in list(patterns)[:_MOST_NAMES])
    more = len(patterns) - _MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def _clipped(name: str) -> str:
    """The end of a long name, which tells more than its beginning."""
    return name if len(name) <= _MOST_LETTERS else f"…{name[1 - _MOST_LETTERS :]}"

"""Names of many parts in few words."""

import re
from collections.abc import Iterable


def starred(name: str) -> str:
    """A name with its numbers replaced by a star, so that parts of many blocks have one.

    >>> starred("blocks.0.experts.up[3]")
    'blocks.*.experts.up[*]'
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)|(?<=\[)\d+(?=\]$)", "*", name)


def folded(names: Iterable[str], most: int = 8) -> str:
    """Names in few words, for an error or a warning.

    >>> folded(["blocks.0.norm.weight", "blocks.1.norm.weight", "pos"])
    'blocks.*.norm.weight, pos'
    """
    patterns = dict.fromkeys(map(starred, names))
    shown = ", ".join(_clipped(pattern) for pattern in list(patterns)[:most])
    return shown if len(patterns) <= most else f"{shown} and {len(patterns) - most} more"


def _clipped(name: str, most: int = 48) -> str:
    """A long name by its end, which tells more than its beginning."""
    return name if len(name) <= most else f"…{name[1 - most :]}"

"""Where `rankup tune` looks for each method's settings: as many trials for every method, ours
included. No torch here."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from rankup.errors import RankupError

Settings = dict[str, Any]  # fields of the recipe, and the method's own options
TRIALS = 12


def _each(name: str, *values: Any) -> list[Settings]:
    return [{name: value} for value in values]


_ADAM = [_each("lr", 3e-4, 1e-3, 3e-3, 1e-2), _each("weight_decay", 0.0, 1e-2, 1e-1)]
_REPLAY = [_each("lr", 0.01, 0.03, 0.1), _each("replay", 10, 64, 128, 256)]

# Every combination of one setting from each list is a trial.
SEARCH: Mapping[str, Iterable[list[Settings]]] = {
    "rank": _ADAM,
    "finetune": _ADAM,
}


def trials(method: str) -> list[Settings]:
    """All settings to try for a method.

    >>> len(trials("rank")), trials("rank")[0]
    (12, {'lr': 0.0003, 'weight_decay': 0.0})
    """
    if method not in SEARCH:
        raise RankupError(f"there is nothing to tune about {method!r}, only {', '.join(SEARCH)}")
    merged = []
    for chosen in itertools.product(*SEARCH[method]):
        settings: Settings = {}
        for part in chosen:
            settings |= part
        merged.append(settings)
    return merged

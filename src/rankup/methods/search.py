"""Trials of `rankup tune`: the combinations of a tuning grid. No torch here."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from enum import StrEnum
from typing import Any

from rankup.errors import RankupError
from rankup.methods.info import Values, axis
from rankup.methods.options import option_fields
from rankup.methods.registry import method_info, method_options
from rankup.methods.settings import apart
from rankup.training.recipe import Recipe

TRIALS = 12  # of every built-in method


class Search(StrEnum):
    """Whether all trials learn all tasks, or most of them only a few."""

    grid = "grid"
    asha = "asha"


def trials(method: str, instead: Sequence[str] = ()) -> list[Values]:
    """All settings to try for a method: every combination of its grid.

    Args:
        instead: the axes of another grid, such as "lr=0.01,0.02".

    >>> len(trials("rank")), trials("rank")[0]
    (12, {'lr': 0.01, 'weight_decay': 0.0, 'first_factors': 0.0})
    >>> trials("ewc", ["lr=0.001", "strength=10,100"])
    [{'lr': 0.001, 'strength': 10.0}, {'lr': 0.001, 'strength': 100.0}]
    """
    search, given = method_info(method).search, dict[str, list[Values]]()
    for text in instead:
        name, tried = _parsed(method, text)
        if name in given:
            raise RankupError(f"the values to try for {name} must be given once, as {name}=A,B,…")
        given[name] = tried
    combinations = itertools.product(*(given.values() or search))
    return [{name: v for entry in chosen for name, v in entry.items()} for chosen in combinations]


def _parsed(method: str, text: str) -> tuple[str, list[Values]]:
    """Parse an axis that is given as NAME=A,B,… into its name and settings. Raises an error if the
    method has no such setting, or the setting cannot have such a value."""
    name, _, values = text.partition("=")
    name = name.strip().replace("-", "_")
    if not values:
        raise RankupError(f"values to try must be given as NAME=A,B,…, got {text!r}")
    items = (*fields(Recipe), *option_fields(method_info(method).options))
    known = {item.name: item for item in items}
    if name not in known:
        raise RankupError(f"{name!r} is not a setting of {method}, which has {', '.join(known)}")
    tried = axis(name, *(_value(name, type(known[name].default), v) for v in values.split(",")))
    for settings in tried:
        if tried.count(settings) > 1:
            raise RankupError(f"{name} must be tried with each value once, got {text!r}")
        recipe, options = apart(settings)
        Recipe(**recipe)
        method_options(method, options)
    return name, tried


def _value(name: str, kind: type, text: str) -> Any:
    parse, wanted = _PARSERS.get(kind, (str, "a word"))
    try:
        return parse(text)
    except (KeyError, ValueError):
        raise RankupError(f"{name} must be {wanted}, got {text!r}") from None


_PARSERS: Mapping[type, tuple[Callable[[str], Any], str]] = {
    bool: ({"yes": True, "no": False}.__getitem__, "yes or no"),
    int: (int, "a whole number"),
    float: (float, "a number"),
}

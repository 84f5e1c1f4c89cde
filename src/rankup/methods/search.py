"""The search space of `rankup tune` for each method: the same number of trials for every method,
ours included. No torch here."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from rankup.errors import RankupError
from rankup.methods import method_info, method_options
from rankup.methods.settings import apart
from rankup.training.recipe import Recipe

Values = dict[str, Any]  # fields of the recipe, and the method's own options
TRIALS = 12  # per method


def _each(name: str, *values: Any) -> list[Values]:
    return [{name: value} for value in values]


_ADAM = [_each("lr", 3e-4, 1e-3, 3e-3, 1e-2), _each("weight_decay", 0.0, 1e-2, 1e-1)]
_REPLAY = [_each("lr", 0.01, 0.03, 0.1), _each("replay", 10, 64, 128, 256)]

# Every combination of one setting from each list is a trial.
SEARCH: Mapping[str, Iterable[list[Values]]] = {
    "rank": [
        _each("lr", 1e-2, 2e-2),
        _each("weight_decay", 0.0, 1e-2, 5e-2),
        _each("first_factors", 0.0, 8.0),
    ],
    "finetune": _ADAM,
    "ewc": [_each("lr", 3e-4, 1e-3, 3e-3), _each("strength", 1e2, 1e3, 1e4, 1e5)],
    "icarl": [_each("lr", 3e-4, 1e-3, 3e-3), _each("strength", 0.3, 1.0, 3.0, 10.0)],
    "agem": _REPLAY,
    "er-ring": _REPLAY,
    "hat": [
        [{"optimiser": "sgd", "lr": 0.5}, *_each("lr", 3e-4, 1e-3, 3e-3)],
        _each("strength", 0.1, 0.75, 2.5),
    ],
    "packnet": [
        _each("lr", 1e-3, 3e-3, 1e-2),
        _each("weight_decay", 0.0, 1e-2),
        _each("retrain", 1 / 3, 1 / 2),
    ],
    "supsup": [
        _each("lr", 3e-3, 1e-2, 3e-2),
        _each("weight_decay", 0.0, 1e-2),
        _each("share", 0.1, 0.3),
    ],
    "orthog": [
        _each("lr", 0.05, 0.1, 0.2),
        _each("basis", "orthogonal", "identity"),
        _each("stiefel", "yes", "no"),
    ],
    "nscl": [_each("lr", 3e-4, 1e-3, 3e-3), _each("energy", 0.01, 0.05, 0.1, 0.3)],
    "ibpwf": [_each("lr", 1e-3, 3e-3), _each("alpha", 10.0, 20.0, 40.0), _each("keep", 0.4, 0.5)],
    "parallel": _ADAM,
    "multitask": _ADAM,
}


def trials(method: str, instead: Sequence[str] = ()) -> list[Values]:
    """All settings to try for a method.

    Args:
        instead: what to try in place of its own search: names with values, like "lr=0.01,0.02".

    >>> len(trials("rank")), trials("rank")[0]
    (12, {'lr': 0.01, 'weight_decay': 0.0, 'first_factors': 0.0})
    >>> trials("ewc", ["lr=0.001", "strength=10,100"])
    [{'lr': 0.001, 'strength': 10.0}, {'lr': 0.001, 'strength': 100.0}]
    """
    method_info(method)
    given: dict[str, list[Values]] = {}
    for text in instead:
        name, tried = _parsed(method, text)
        if name in given:
            raise RankupError(f"the values to try for {name} must be given once, as {name}=A,B,…")
        given[name] = tried
    lists = given.values() or SEARCH[method]
    merged = []
    for chosen in itertools.product(*lists):
        settings: Values = {}
        for part in chosen:
            settings |= part
        merged.append(settings)
    return merged


def _parsed(method: str, text: str) -> tuple[str, list[Values]]:
    """The name and the settings given as NAME=A,B,…; refused where the method has no such setting
    or the setting cannot have such a value."""
    name, _, values = text.partition("=")
    name = name.strip().replace("-", "_")
    if not values:
        raise RankupError(f"values to try must be given as NAME=A,B,…, got {text!r}")
    known = {item.name: item for item in (*fields(Recipe), *fields(method_info(method).options))}
    if name not in known:
        raise RankupError(f"{name!r} is not a setting of {method}, which has {', '.join(known)}")
    found = _each(name, *(_value(name, type(known[name].default), v) for v in values.split(",")))
    for settings in found:
        if found.count(settings) > 1:
            raise RankupError(f"{name} must be tried with each value once, got {text!r}")
        own = apart(settings)
        Recipe(**own.recipe)
        method_options(method, own.options)
    return name, found


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

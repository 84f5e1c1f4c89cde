"""The rule by which a network guesses the task of an input, as plain data."""

from collections.abc import Iterator
from dataclasses import dataclass

from rankup.errors import RankupError

ROUTERS = ("energy", "mahalanobis", "means", "analytic")
MOST_FEATURES = 8192
_OPTIONS = ("features", "apart", "patches")
_PATCHES = {"": 1, "2": 2}  # kinds of their features


@dataclass(frozen=True)
class RouterRule:
    """Which routers vote for an input's task, and with which weights.

    Args:
        weights: of each router that votes.
        features: how many seeded random features the analytic router takes.
        apart: whether each task keeps its own sums of them, in its own file, which the analytic
            router needs to forget a task. They take much more room than one sum over all tasks.
        patches: which kind of features of patches of natural images these are, 1 or 2; with 0 they
            are of any inputs.

    >>> RouterRule.parse("energy, mahalanobis=0.1").weights
    (('energy', 1.0), ('mahalanobis', 0.1))
    >>> str(RouterRule.parse("analytic, features=256, apart, patches=2"))
    'analytic=1,features=256,apart,patches=2'
    """

    weights: tuple[tuple[str, float], ...]
    features: int = 1024
    apart: bool = False
    patches: int = 0

    @classmethod
    def parse(cls, text: str) -> "RouterRule":
        """The rule that a text names: routers and options between commas, such as
        `"energy, mahalanobis=0.1"`."""
        if not isinstance(text, str):
            raise RankupError(f"a router is named by a text, such as 'energy', got {text!r}")
        given = dict(_entries(text))
        weights = {name: _weight(name, given[name]) for name in ROUTERS if name in given}
        if unknown := given.keys() - {*ROUTERS, *_OPTIONS}:
            raise RankupError(
                f"there is no router {min(unknown)!r}, only {', '.join(ROUTERS)} "
                f"and the options {', '.join(_OPTIONS)}"
            )
        if not weights:
            raise RankupError(f"a router is one of {', '.join(ROUTERS)}, got {text!r}")
        if given.get("apart"):
            raise RankupError(f"apart takes no value, got {given['apart']!r}")
        if "analytic" not in weights and (needless := given.keys() & {*_OPTIONS}):
            raise RankupError(
                f"{min(needless)} is an option of the analytic router: name that, too"
            )
        features, patches = _features(given.get("features")), _patches(given.get("patches"))
        return cls(tuple(weights.items()), features, "apart" in given, patches)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.weights)

    def __str__(self) -> str:
        parts = [f"{name}={weight:g}" for name, weight in self.weights]
        parts += [f"features={self.features}"] if "analytic" in self.names else []
        parts += ["apart"] if self.apart else []
        parts += [{1: "patches", 2: "patches=2"}[self.patches]] if self.patches else []
        return ",".join(parts)


def _entries(text: str) -> Iterator[tuple[str, str]]:
    seen = set()
    for entry in text.split(","):
        name, _, value = (part.strip() for part in entry.partition("="))
        if name in seen:
            raise RankupError(f"a router names {name!r} twice: {text!r}")
        seen.add(name)
        yield name, value


def _weight(name: str, text: str) -> float:
    try:
        weight = float(text or 1)
    except ValueError:
        weight = 0
    if not 0 < weight < 1e6:
        raise RankupError(f"the weight of router {name!r} must be a positive number, got {text!r}")
    return weight


def _features(text: str | None) -> int:
    if text is None:
        return RouterRule.features
    if not text.isdecimal() or not 1 <= int(text) <= MOST_FEATURES:
        raise RankupError(f"features must be a number from 1 to {MOST_FEATURES:,}, got {text!r}")
    return int(text)


def _patches(text: str | None) -> int:
    if text is None:
        return 0
    if text not in _PATCHES:
        raise RankupError(f"patches takes no value, or 2, got {text!r}")
    return _PATCHES[text]

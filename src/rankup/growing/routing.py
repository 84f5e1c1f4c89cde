"""The rule by which a network guesses the task of an input, as plain data."""

from collections.abc import Iterator
from dataclasses import dataclass

from rankup.errors import RankupError

ROUTERS = ("energy", "mahalanobis", "means", "analytic")
MOST_FEATURES = 8192
_FLAGS = ("apart", "patches")
_OPTIONS = ("features", *_FLAGS)


@dataclass(frozen=True)
class RouterRule:
    """Which routers vote for an input's task, and with which weights.

    Args:
        weights: of each router that votes.
        features: how many seeded random features the analytic router takes.
        apart: whether each task keeps its own sums of them, in its own file, which the analytic
            router needs to forget a task. They take much more room than one sum over all tasks.
        patches: whether those features are of patches of natural images, not of any inputs.

    >>> RouterRule.parse("energy, mahalanobis=0.1").weights
    (('energy', 1.0), ('mahalanobis', 0.1))
    >>> str(RouterRule.parse("analytic, features=256, apart"))
    'analytic=1,features=256,apart'
    """

    weights: tuple[tuple[str, float], ...]
    features: int = 1024
    apart: bool = False
    patches: bool = False

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
        for flag in _FLAGS:
            if given.get(flag):
                raise RankupError(f"{flag} takes no value, got {given[flag]!r}")
        if "analytic" not in weights and (needless := given.keys() & {*_OPTIONS}):
            raise RankupError(
                f"{min(needless)} is an option of the analytic router: name that, too"
            )
        flags = {flag: flag in given for flag in _FLAGS}
        return cls(tuple(weights.items()), _features(given.get("features")), **flags)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.weights)

    def __str__(self) -> str:
        parts = [f"{name}={weight:g}" for name, weight in self.weights]
        parts += [f"features={self.features}"] if "analytic" in self.names else []
        return ",".join(parts + [flag for flag in _FLAGS if getattr(self, flag)])


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

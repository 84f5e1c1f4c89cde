"""Rank rules: how many factors a layer gets for each task. The number is fixed, a share of the
layer's outputs, or given by layer name; a rule also says how many seeded factors a layer has, and
whether factors that a task can do without are dropped."""

import math
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_UP, Decimal
from fnmatch import fnmatchcase
from numbers import Integral, Real
from typing import Any

from rankup.errors import RankupError

Seeded = int | str


@dataclass(frozen=True)
class Rank:
    """A rule for the number of factors of each layer.

    Args:
        first: how many factors the first task adds.
        step: how many every later task adds.
        seeded: how many seeded factors a layer also selects from: a number, a multiple of the
            layer's outputs (`"4x"`), or a sequence with one of these per layer in the order in
            which the layers run.
        of_outputs: whether `first` and `step` are shares of a layer's outputs, as in
            `Rank.proportional`.
        prune: whether `fit` drops selectors, factors, biases and weights of heads that a task can
            do without: as many as possible while its accuracy and loss on held-out data stay
            within one standard error, or within as many as are given.

    >>> Rank(first=11, step=1)
    Rank(first=11, step=1, seeded=0, of_outputs=False, prune=False)
    >>> Rank(first=0, step=0, seeded=[1536, 768], prune=True)
    Rank(first=0, step=0, seeded=(1536, 768), of_outputs=False, prune=1.0)
    """

    first: int | float = 11
    step: int | float = 1
    seeded: Seeded | Sequence[Seeded] = 0
    of_outputs: bool = False
    prune: bool | float = False

    def __post_init__(self) -> None:
        for name in ("first", "step"):
            object.__setattr__(self, name, as_python(getattr(self, name)))
            _check_amount(name, getattr(self, name), self.of_outputs)
        if isinstance(self.seeded, Sequence) and not isinstance(self.seeded, str):
            object.__setattr__(self, "seeded", tuple(map(as_python, self.seeded)))
        else:
            object.__setattr__(self, "seeded", as_python(self.seeded))
        per_layer = self.seeded if isinstance(self.seeded, tuple) else (self.seeded,)
        multiples = [_seeded_multiple(entry) for entry in per_layer]
        if not self.first and not all(multiples):
            raise RankupError(
                f"first=0 needs seeded factors in every layer, got seeded={self.seeded!r}: without "
                "them a layer has nothing to select from"
            )
        object.__setattr__(self, "prune", _tolerance(self.prune))

    @classmethod
    def proportional(
        cls,
        first: float = 0.1,
        step: float = 0.02,
        *,
        seeded: Seeded | Sequence[Seeded] = 0,
        prune: bool | float = False,
    ) -> "Rank":
        """A rule whose ranks are shares of a layer's outputs, rounded half up; at least 1 unless
        the share is 0.

        >>> Rank.proportional(0.1, 0.02)._amounts(outputs=160), Rank.proportional()._amounts(20)
        ((16, 3), (2, 1))
        """
        return cls(first, step, seeded, of_outputs=True, prune=prune)

    def _amounts(self, outputs: int) -> tuple[int, int]:
        """`first` and `step` for a layer with this many outputs."""
        if not self.of_outputs:
            return int(self.first), int(self.step)
        return _share(self.first, outputs), _share(self.step, outputs)


@dataclass(frozen=True)
class Place:
    """A task's place among the others, which determines the shapes of its tensors.

    A root is a task that selects from the factors of no other. It adds the first rank, any other
    task adds the step.

    Args:
        is_first: whether it is the network's first task, which trains what all tasks share.
        roots: how many roots it selects from.
        others: how many other tasks it selects from.
    """

    is_first: bool = True
    roots: int = 0
    others: int = 0

    @classmethod
    def number(cls, index: int) -> "Place":
        """The place of task number `index`, from 0, if every task selects from all before it."""
        return cls(index == 0, min(index, 1), max(0, index - 1))

    @property
    def is_root(self) -> bool:
        return not self.roots + self.others


@dataclass(frozen=True)
class LayerRank:
    """A rank rule for one layer, in numbers of factors."""

    first: int
    step: int
    seeded: int
    prune: bool = False  # whether factors that a task can do without are dropped

    def added(self, place: Place) -> int:
        """How many learned factors a task adds."""
        return self.first if place.is_root else self.step

    def used(self, place: Place) -> int:
        """How many factors a task selects from: seeded ones, those of other tasks and its own."""
        others = self.first * place.roots + self.step * place.others
        return self.seeded + others + self.added(place)


@dataclass(frozen=True)
class Shape:
    """A layer's weight as a matrix: `outputs` × `inputs`, a kernel's taps among the inputs."""

    outputs: int
    inputs: int

    @property
    def rank(self) -> int:
        return min(self.outputs, self.inputs)


def as_python(value: Any) -> Any:
    """Convert a number of any library, such as NumPy, to a Python one, which JSON can hold."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def as_whole(name: str, value: Any) -> int:
    """Return an option as an `int`, or raise if it is not a whole number.

    Args:
        name: how the error message names it.
    """
    number = as_python(value)
    if isinstance(number, bool) or not isinstance(number, int):
        raise RankupError(f"{name} must be a whole number, got {number!r}")
    return number


RankRule = Rank | Mapping[str, Rank]


def resolve(rule: RankRule, shapes: Mapping[str, Shape]) -> dict[str, LayerRank]:
    """Apply a rule to the layers, named in the order in which they run.

    A mapping gives rules by name pattern, of which the first that matches a layer counts.

    >>> shapes = {"conv": Shape(8, 27), "deep.fc": Shape(16, 8)}
    >>> ranks = resolve({"deep.*": Rank(2, 1), "*": Rank(4, 0, seeded="4x")}, shapes)
    >>> ranks["conv"]
    LayerRank(first=4, step=0, seeded=32, prune=False)
    >>> ranks["deep.fc"]
    LayerRank(first=2, step=1, seeded=0, prune=False)
    """
    resolved = {}
    for rank, names in _layers_by_rule(rule, list(shapes)):
        seeded = rank.seeded if isinstance(rank.seeded, tuple) else (rank.seeded,) * len(names)
        if len(seeded) != len(names):
            raise RankupError(
                f"seeded={reprlib.repr(list(seeded))} gives {len(seeded)} numbers for {len(names)} "
                f"layers ({_few(names)}): one per layer is expected"
            )
        for name, entry in zip(names, seeded, strict=True):
            outputs = shapes[name].outputs
            first, step = rank._amounts(outputs)
            prunes = rank.prune is not False
            resolved[name] = LayerRank(first, step, _seeded_count(entry, outputs), prunes)
    tolerance_of(rule)
    return {name: resolved[name] for name in shapes}


def tolerance_of(rule: RankRule) -> float | None:
    """How many standard errors of held-out accuracy a task may lose by pruning; None if no layer is
    pruned.

    >>> tolerance_of({"deep.*": Rank(2, 1), "*": Rank(4, 0, prune=True)}), tolerance_of(Rank())
    (1.0, None)
    """
    ranks = rule.values() if isinstance(rule, Mapping) else [rule]
    given = {float(rank.prune) for rank in ranks if rank.prune is not False}
    if len(given) > 1:
        raise RankupError(
            "all layers that drop factors lose accuracy together, so their prune must be the same, "
            f"got {' and '.join(map(str, sorted(given)))}"
        )
    return next(iter(given), None)


def capped(rank: LayerRank, shape: Shape) -> LayerRank:
    """Cap the learned factors of a task at the rank of the layer's weight. Seeded factors, and the
    sum over tasks, may exceed it.

    >>> capped(LayerRank(first=22, step=1, seeded=500), Shape(outputs=20, inputs=784))
    LayerRank(first=20, step=1, seeded=500, prune=False)
    """
    return replace(rank, first=min(rank.first, shape.rank), step=min(rank.step, shape.rank))


def parse_rank(rank: str, seeded: str | None) -> Rank:
    """Parse a rank rule of the command line.

    >>> parse_rank("11,1", None)
    Rank(first=11, step=1, seeded=0, of_outputs=False, prune=False)
    >>> parse_rank("0.1,0.02", "4x")
    Rank(first=0.1, step=0.02, seeded='4x', of_outputs=True, prune=False)
    """
    try:
        first, step = rank.split(",")
        if ("." in first) != ("." in step) and float(first) and float(step):
            raise ValueError("a share and a number")
        amounts = (float(first), float(step)) if "." in rank else (int(first), int(step))
        entries = [e if e.endswith("x") else int(e) for e in seeded.split(",")] if seeded else [0]
    except ValueError:
        raise RankupError(
            "rank must be written like 11,1 or 0.1,0.02, both numbers or both shares, and seeded "
            f"like 256, 4x or 1536,768; got rank {rank!r} and seeded {seeded!r}"
        ) from None
    by_layer = entries[0] if len(entries) == 1 else entries
    return Rank(amounts[0], amounts[1], by_layer, of_outputs="." in rank)


def rule_to_json(rule: RankRule) -> Any:
    """Convert a rule to plain data. A mapping becomes a list of pairs, whose order matters."""
    if isinstance(rule, Mapping):
        return [[pattern, rule_to_json(rank)] for pattern, rank in rule.items()]
    seeded = list(rule.seeded) if isinstance(rule.seeded, tuple) else rule.seeded
    data = {
        "first": rule.first,
        "step": rule.step,
        "seeded": seeded,
        "of_outputs": rule.of_outputs,
    }
    # Only if it is used, so that other rules are written as before it existed.
    return data if rule.prune is False else data | {"prune": rule.prune}


def rule_from_json(data: Any) -> RankRule:
    """Undo `rule_to_json`."""
    if isinstance(data, list):
        return {pattern: Rank(**rank) for pattern, rank in data}
    return Rank(**data)


def is_match(name: str, pattern: str) -> bool:
    """Whether a name matches a pattern, or equals it, as names may have brackets.

    >>> is_match("blocks.0.fc", "blocks.*"), is_match("parts.c[0]", "parts.c[0]")
    (True, True)
    """
    return name == pattern or fnmatchcase(name, pattern)


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches the name of a layer or of a module that contains it.

    >>> is_named("attention.in_proj_weight[0]", ["attention"])
    True
    """
    parts = name.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return any(is_match(name, pattern) for pattern in patterns for name in names)


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(name if len(name) < 50 else f"…{name[-48:]}" for name in names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def _layers_by_rule(rule: RankRule, names: list[str]) -> list[tuple[Rank, list[str]]]:
    if isinstance(rule, Rank):
        return [(rule, names)]
    if not isinstance(rule, Mapping) or not all(isinstance(r, Rank) for r in rule.values()):
        raise RankupError(f"rank must be a Rank or a mapping of patterns to Ranks, got {rule!r}")
    layers: dict[str, list[str]] = {pattern: [] for pattern in rule}
    for name in names:
        pattern = next((pattern for pattern in rule if is_named(name, [pattern])), None)
        if pattern is None:
            raise RankupError(
                f"no rank rule matches layer {name!r}; the rules are for {_few(list(rule))}"
            )
        layers[pattern].append(name)
    for pattern, matched in layers.items():
        if not matched:
            raise RankupError(
                f"the rank rule {pattern!r} applies to none of the layers {_few(names)} that no "
                "earlier rule applies to"
            )
    return [(rule[pattern], matched) for pattern, matched in layers.items()]


def _check_amount(name: str, amount: object, of_outputs: bool) -> None:
    if isinstance(amount, bool) or not isinstance(amount, int | float) or not math.isfinite(amount):
        raise RankupError(f"{name} must be a number, got {amount!r}")
    if amount < 0:
        raise RankupError(f"{name} must not be negative, got {amount}")
    if of_outputs and amount > 1:
        raise RankupError(
            f"{name} must be a share of a layer's outputs, from 0 to 1, got {amount}; ranks are "
            "whole numbers, as in Rank(11, 1)"
        )
    if not of_outputs and not isinstance(amount, int):
        raise RankupError(
            f"{name} must be a whole number, got {amount}; for shares use Rank.proportional"
        )


def _tolerance(prune: object) -> float | bool:
    """`prune` in standard errors; False if nothing is pruned."""
    if prune is False or prune is True:
        return 1.0 if prune else False
    number = as_python(prune)
    if not isinstance(number, int | float) or not 0 <= number < math.inf:
        raise RankupError(
            "prune must be True, False or a number of standard errors that is not negative, got "
            f"{prune!r}"
        )
    return float(number)


def _share(share: float, outputs: int) -> int:
    # Decimal, because 0.29 · 50 is 14.499999999999998 in binary and would round the wrong way.
    exact = Decimal(str(share)) * outputs
    return max(1, int(exact.quantize(Decimal(1), ROUND_HALF_UP))) if share else 0


def _seeded_multiple(entry: object) -> float:
    """The number in an entry of `seeded`: a count, or a multiple of the layer's outputs."""
    if isinstance(entry, str) and re.fullmatch(r"\d+(\.\d+)?x", entry):
        return float(entry[:-1])
    if isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0:
        return entry
    raise RankupError(
        f"seeded must be a number of factors (256) or a multiple of the outputs ('4x'), "
        f"got {entry!r}"
    )


def _seeded_count(entry: Seeded, outputs: int) -> int:
    return entry if isinstance(entry, int) else _share(float(entry[:-1]), outputs)

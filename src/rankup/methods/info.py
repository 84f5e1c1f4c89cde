"""Entries of the registry of methods. No torch here."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from rankup.methods.options import Options

if TYPE_CHECKING:
    from rankup.methods.base import Method

Values = dict[str, Any]  # fields of the recipe, and the method's own options


def axis(name: str, *values: Any) -> list[Values]:
    """One axis of a tuning grid: the values to try for a setting.

    >>> axis("lr", 0.01, 0.03)
    [{'lr': 0.01}, {'lr': 0.03}]
    """
    return [{name: value} for value in values]


DEFAULT_SEARCH = (axis("lr", 3e-4, 1e-3, 3e-3, 1e-2), axis("weight_decay", 0.0, 1e-2, 1e-1))


class MethodInfo(NamedTuple):
    """An entry of the registry.

    Args:
        home: the class, or for a built-in method its file and name, imported when it is needed.
        help: one line for `rankup methods`.
        options: the dataclass of its options, each of which is a flag of `rankup run` and
            `compare`.
        continual: whether it sees one task after another; False for an upper bound.
        open_ended: whether the number of tasks need not be known at the start.
        recipe: fields of the recipe that it overrides, unless the user gives them.
        search: the axes of its tuning grid; every combination of one entry of each is a trial.
    """

    home: "str | type[Method]"
    help: str
    options: type[Options] = Options
    continual: bool = True
    open_ended: bool = False
    recipe: Mapping[str, Any] = MappingProxyType({})
    search: Sequence[Sequence[Values]] = DEFAULT_SEARCH

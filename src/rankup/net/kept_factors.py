"""How many factors a task kept of each layer that may drop factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankup.layers.spec import FactoredSpec, Spec

if TYPE_CHECKING:
    from rankup.net.tasks import TaskList


@dataclass(frozen=True)
class KeptFactors:
    """How many factors of one layer a task kept.

    Attributes:
        factors: how many it kept.
        of: how many it could have kept.
        own: how many of the kept ones are its own.
    """

    factors: int
    of: int
    own: int


def kept_of_layers(specs: Sequence[Spec], known: TaskList, index: int) -> dict[str, KeptFactors]:
    """How many factors the task at an index kept, by layer, computed without its tensors."""
    task, place, found = known.tasks[index], known.place(known.tasks[index], index), {}
    for spec in specs:
        if isinstance(spec, FactoredSpec) and (kept := task.kept.get(spec.name)) is not None:
            of = spec.rank.used(place)
            found[spec.name] = KeptFactors(kept["selector"], of, kept.get("U", 0))
    return found

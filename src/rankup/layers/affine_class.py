"""The class of modules that scale and shift by vectors of the active task."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch import Tensor

from rankup.layers.affine import Affine
from rankup.layers.task_context import active_task
from rankup.utils.derived import derived_class
from rankup.utils.per_thread import PerThread, set_to

STAND_INS = "_stand_ins_of_rankup"  # of a derived class: their names, by what they stand in for
TAKES_ROWS = "_takes_rows_of_rankup"  # of one whose modules a mixed batch runs through once

_neutral = PerThread[dict[str, Tensor]]()  # vectors without effect, read in place of a task's


@cache  # so that torch.compile does not compile the same code again for each module
def affine_class(kind: Any, affine: Affine, names: tuple[tuple[str, str], ...]) -> Any:
    """A class derived from a module's.

    Args:
        names: pairs of a vector's name and the name of the submodule that it is read from.
    """
    attributes: dict[str, Any] = {
        STAND_INS: {key: [name] for key, name in names},
        TAKES_ROWS: True,
        "forward": _then_rows(kind.forward, affine, names),
    }
    attributes |= {key: property(_reader(name)) for key, name in names}
    return derived_class(kind, attributes)


def _reader(name: str) -> Callable[[Any], Tensor]:
    def read(self: Any) -> Tensor:
        neutral = _neutral.value
        return self._modules[name]() if neutral is None else neutral[name]

    return read


def _then_rows(
    forward: Callable[..., Any], affine: Affine, names: tuple[tuple[str, str], ...]
) -> Callable[..., Any]:
    """A forward that for a mixed batch runs the module's own with neutral vectors, and then scales
    and shifts each sample by those of its task."""

    @wraps(forward)
    def run(self: Any, *inputs: Tensor, **named: Tensor) -> Any:
        (x,) = (*inputs, *named.values())  # all that such a module takes
        if not isinstance(active_task(), Tensor):
            return forward(self, x)
        rows, neutral = {}, {}
        for key, name in names:
            rows[key], neutral[name] = self._modules[name].of_mixed(x)
        with set_to(_neutral, neutral):
            y = forward(self, x)
        return affine.apply(y, rows)

    return run

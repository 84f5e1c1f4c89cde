"""STAND-IN until net.describe lands."""

from dataclasses import dataclass
from typing import Any

from rankup.net.network import IncrementalNet


@dataclass(frozen=True)
class TaskDescription:
    name: str
    classes: int
    class_names: tuple[str, ...] = ()
    inputs: Any = None
    samples: int | None = None
    accuracy: float | None = None
    recipe: Any = None
    uses: tuple[str, ...] = ()
    numbers: int = 0
    title: str = ""
    description: str = ""
    tags: tuple[str, ...] = ()


def describe(net: IncrementalNet, name: str) -> Any:
    if hasattr(net, "describe"):
        return net.describe(name)  # type: ignore[operator]
    at = net.tasks.index(name)
    return TaskDescription(
        name,
        net.classes[name],
        uses=tuple(net.tasks[:at]),
        numbers=net.size(name).total,
        inputs=getattr(net, "inputs", None),
    )


def inputs_of(net: IncrementalNet) -> Any:
    return getattr(net, "inputs", None)

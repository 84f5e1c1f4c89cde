"""The paper's tables and figures, each one function: `rankup paper NAME`."""

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from rankup.errors import RankupError

if TYPE_CHECKING:
    from rankup.paper.experiment import Experiment
    from rankup.paper.plots import Figure
    from rankup.paper.tables import Table


class Part(NamedTuple):
    home: str  # its file and function
    help: str  # in one line


PARTS = {
    "accuracy": Part("mlp:accuracy", "three-layer MLP, all methods, four streams"),
    "forgetting": Part("mlp:forgetting", "what tasks lose after they were learned"),
    "memory": Part("mlp:memory", "parameters and replay buffers on S-CIFAR100"),
    "masks": Part("mlp:masks", "parameters of the methods that never forget"),
    "rank": Part("ranks:rank", "five choices of first rank and increment"),
    "first-rank": Part("ranks:first_rank", "how the first rank of 11 was chosen"),
    "resnet18": Part("resnet18:resnet18", "ResNet18, all methods, two streams"),
    "last-layers": Part("resnet18:last_layers", "only the last layers go on learning"),
    "class-incremental": Part("untold:class_incremental", "without being told the task"),
    "figure-accuracy": Part("plots:figure_accuracy", "average accuracy as tasks come in"),
    "figure-transition": Part("plots:figure_transition", "accuracy matrices of three methods"),
    "reuse": Part("ranks:reuse", "what selecting from old factors is worth"),
    "equal-budgets": Part("budgets:equal_budgets", "rivals with the budget of our best"),
    "figure-front": Part("front:figure_front", "accuracy over bytes at equal budgets"),
    "ablation": Part("ablation:ablation", "what each part of our recipes is worth"),
    "full-rank": Part("ranks:full_rank", "tasks that come when a layer has its full rank"),
}


def part(name: str) -> "Table | Figure":
    """A table or figure: what it needs to be run and how it is shown."""
    if name not in PARTS:
        raise RankupError(f"there is no table or figure {name!r}, only {', '.join(PARTS)} and all")
    home, _, function = PARTS[name].home.partition(":")
    make: Callable[[], Table | Figure] = getattr(import_module(f"rankup.paper.{home}"), function)
    return make()


def experiments_of(parts: "Iterable[Table | Figure]") -> "list[Experiment]":
    """What has to be run for these tables and figures, each experiment once."""
    return list(dict.fromkeys(experiment for part in parts for experiment in part.experiments()))

"""Methods about to learn, and their answers."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

import rankup
from rankup.data.streams import Stream
from rankup.growing.options import GrowOptions
from rankup.methods import METHODS, method_class, method_options
from rankup.methods.base import Method, Setting
from rankup.rank import Rank
from rankup.training.batches import Feed
from rankup.training.recipe import Recipe

CPU = torch.device("cpu")


NETS = {
    "mlp": lambda: rankup.models.mlp(64, hidden=[32, 32]),
    "resnet18": lambda: rankup.models.resnet18(width=4, image_size=8, channels=1),
}


# Sizes in the MLP: what all tasks share, and a head.
SHARED = 64 * 32 + 32 + 32 * 32 + 32


HEAD = 32 * 10 + 10


class Expected(NamedTuple):
    """What to expect of a method, with the recipe and the options it is run with here."""

    accuracy: float  # on s-digits after all five tasks, at least
    forgetting: tuple[float, float]  # the same, from … to
    # With the MLP after two tasks of ten classes, in float32 numbers, or how to count it by hand.
    stored: float | Callable[[Method], float]
    buffer: float = 0  # replayed samples, likewise
    recipe: Mapping[str, Any] = MappingProxyType({})
    options: Mapping[str, Any] = MappingProxyType({})


def factors_in_use(method: Any) -> float:
    """The size of weight factors, whose number depends on the data."""
    stored = 2.0 * (64 + HEAD)  # biases and heads
    lengths = {"hidden.0": 64 + 32, "hidden.1": 32 + 32}
    for layer in method.parts:
        if layer.spec.name in lengths:
            chosen = layer.selections  # [2, 64]
            stored += int(chosen.any(0).sum()) * lengths[layer.spec.name] + int(chosen.sum())
            stored += 2 * 64 / 32 + 2 * 64  # a bit for each, and each stick's posterior
    return stored


NONE = (0.0, 0.0)


EXPECTED = {
    "rank": Expected(0.97, NONE, stored=4 * (64 + 32 + 32 + 32) + 2 * (3 + 4) + 2 * 64 + 2 * HEAD),
    "finetune": Expected(0.6, (0.05, 0.4), stored=SHARED + 2 * HEAD),
    "ewc": Expected(
        0.92, (0.0, 0.08), stored=2 * SHARED + 2 * HEAD, options={"strength": 100.0, "samples": 200}
    ),
    "icarl": Expected(
        0.96, (-0.03, 0.03), SHARED + 2 * HEAD, buffer=20 * 5 * 64 / 4, options={"budget": 100}
    ),
    "agem": Expected(
        0.94, (0.0, 0.07), SHARED + 2 * HEAD, buffer=20 * 5 * 64 / 4, options={"replay": 16}
    ),
    "er-ring": Expected(
        0.94, (0.0, 0.07), SHARED + 2 * HEAD, buffer=20 * 5 * 64 / 4, options={"replay": 16}
    ),
    "hat": Expected(
        0.95,
        NONE,
        stored=SHARED + 2 * HEAD + 2 * 64 / 32,  # a bit per unit and task
        recipe={"optimiser": "sgd", "lr": 0.5},
        options={"strength": 0.1},
    ),
    # Biases per task, and two bits for a weight's owner: one of two tasks, or nobody.
    "packnet": Expected(0.97, NONE, stored=SHARED + 64 + 2 * HEAD + (SHARED - 64) * 2 / 32),
    "supsup": Expected(0.95, NONE, stored=2 * HEAD + 2 * (64 * 32 + 32 * 32) / 32),
    "orthog": Expected(
        0.96, (0.0, 0.05), SHARED + 2 * HEAD, buffer=20 * 5 * 64 / 4, options={"replay": 16}
    ),
    "nscl": Expected(0.95, (-0.02, 0.04), stored=SHARED + 2 * HEAD + 65 * 66 // 2 + 33 * 34 // 2),
    "ibpwf": Expected(0.95, NONE, stored=factors_in_use, options={"dictionary": 64}),
    "parallel": Expected(0.97, NONE, stored=2 * (SHARED + HEAD)),
    "multitask": Expected(0.97, NONE, stored=SHARED + 2 * HEAD),
}


def make(name: str, stream: Stream, net: str = "mlp", epochs: int = 3) -> Method:
    grow_options = GrowOptions(Rank(3, 1))
    own = {**METHODS[name].recipe, **EXPECTED[name].recipe}
    recipe = Recipe(**{"epochs": epochs, "batch": 32, **own})
    options = method_options(name, EXPECTED[name].options)
    return method_class(name)(Setting(NETS[net](), grow_options, recipe, 0, stream.tasks, options))


def answers(method: Method, stream: Stream, task: int) -> torch.Tensor:
    x = next(Feed(stream[task], method.setting.recipe, CPU).test())[0]
    with torch.no_grad():
        return method.predict(x, task)

"""Expectations of each built-in method."""

from collections.abc import Callable
from typing import Any

from rankup.data.streams import Stream
from rankup.methods.base import Method
from rankup.testing import NETS, Expected, answers, make_method

__all__ = ["EXPECTED", "STORED", "answers", "make"]

# On s-digits after all five tasks.
EXPECTED = {
    "rank": Expected(0.97),
    "finetune": Expected(0.6, (0.05, 0.4)),
    "ewc": Expected(0.92, (0.0, 0.08), options={"strength": 100.0, "samples": 200}),
    "icarl": Expected(0.96, (-0.03, 0.03), options={"budget": 100}),
    "agem": Expected(0.94, (0.0, 0.07), options={"replay": 16}),
    "er-ring": Expected(0.94, (0.0, 0.07), options={"replay": 16}),
    "der": Expected(0.94, (0.0, 0.07), options={"replay": 16}),
    "hat": Expected(0.95, recipe={"optimiser": "sgd", "lr": 0.5}, options={"strength": 0.1}),
    "packnet": Expected(0.97),
    "supsup": Expected(0.95),
    "wsn": Expected(0.97),
    "orthog": Expected(0.96, (0.0, 0.05), options={"replay": 16}),
    "nscl": Expected(0.95, (-0.02, 0.04)),
    "gpm": Expected(0.95, (-0.02, 0.04)),
    "ibpwf": Expected(0.95, options={"dictionary": 64}),
    "vera": Expected(0.95, options={"directions": 256}),
    "randlora": Expected(0.95, options={"block_rank": 8}),
    "parallel": Expected(0.97),
    "multitask": Expected(0.97),
}

# Numbers in the MLP: what all tasks share, a head of ten classes, five images per class of two.
SHARED = 64 * 32 + 32 + 32 * 32 + 32
HEAD = 32 * 10 + 10
MEMORY = 20 * 5 * 64 / 4


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


def bases(method: Any) -> float:
    """The size of bases, whose numbers of directions depend on the data."""
    first, second = method.kept.values()
    return len(first) * (64 + 1) + len(second) * (32 + 1)


# With the MLP after two tasks of ten classes, in float32 numbers: parameters and replay buffer.
STORED: dict[str, tuple[float | Callable[[Method], float], float]] = {
    "rank": (4 * (64 + 32 + 32 + 32) + 2 * (3 + 4) + 2 * 64 + 2 * HEAD, 0),
    "finetune": (SHARED + 2 * HEAD, 0),
    "ewc": (2 * SHARED + 2 * HEAD, 0),
    "icarl": (SHARED + 2 * HEAD, MEMORY),
    "agem": (SHARED + 2 * HEAD, MEMORY),
    "er-ring": (SHARED + 2 * HEAD, MEMORY),
    # An image, ten logits and the class for each slot, and how many samples were seen.
    "der": (SHARED + 2 * HEAD, MEMORY + 20 * 5 * (10 + 1) + 2),
    "hat": (SHARED + 2 * HEAD + 2 * 64 / 32, 0),  # a bit per unit and task
    # Biases per task, and two bits for a weight's owner: one of two tasks, or nobody.
    "packnet": (SHARED + 64 + 2 * HEAD + (SHARED - 64) * 2 / 32, 0),
    "supsup": (2 * HEAD + 2 * (64 * 32 + 32 * 32) / 32, 0),
    # Biases per task, and a bit per weight and task.
    "wsn": (SHARED + 64 + 2 * HEAD + 2 * (SHARED - 64) / 32, 0),
    "orthog": (SHARED + 2 * HEAD, MEMORY),
    "nscl": (SHARED + 2 * HEAD + 65 * 66 // 2 + 33 * 34 // 2, 0),
    "gpm": (lambda method: SHARED + 2 * HEAD + bases(method), 0),
    "ibpwf": (factors_in_use, 0),
    # Biases and heads; 256 directions and 64 outputs; n (r + min(in, out)), n = 4, r = 8.
    "vera": (2 * (64 + HEAD + 2 * 256 + 64), 0),
    "randlora": (2 * (64 + HEAD + 2 * 4 * (8 + 32)), 0),
    "parallel": (2 * (SHARED + HEAD), 0),
    "multitask": (SHARED + 2 * HEAD, 0),
}


def make(name: str, stream: Stream, net: str = "mlp", epochs: int = 3) -> Method:
    expected = EXPECTED[name]
    recipe = {"epochs": epochs, **expected.recipe}
    return make_method(name, stream, NETS[net](), options=expected.options, **recipe)

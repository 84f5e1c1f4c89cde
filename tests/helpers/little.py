"""Small streams and methods on them, for tests of methods that replay."""

from typing import Any

import torch
from torch import Tensor

import rankup
from rankup.data.streams import Stream
from rankup.methods.base import Method
from rankup.methods.shared.replay import ReplayLearner
from rankup.testing import make_method

CLASSES = (3, 2, 4)


def tasks(*classes: int, dtype: torch.dtype = torch.uint8) -> list[rankup.Task]:
    """Tasks of 24 small images each, as bytes or floats."""
    made = []
    for index, number in enumerate(classes or CLASSES):
        draw = torch.Generator().manual_seed(index)
        x = torch.randint(256, (24, 1, 4, 4), generator=draw).to(torch.uint8)
        y = torch.randperm(24, generator=draw) % number
        x = x if dtype == torch.uint8 else x.to(dtype) / 255
        made.append(rankup.Task(f"{index}", number, x, y, x, y))
    return made


def little_stream(*classes: int) -> Stream:
    return Stream("little", tuple(tasks(*classes)))


def make(
    name: str,
    stream: Stream,
    net: str = "mlp",
    device: str = "cpu",
    options: dict[str, Any] | None = None,
    seed: int = 0,
    **recipe: Any,
) -> Any:
    """A method about to learn a stream, with its own recipe except for what is given."""
    shape = stream[0].train_x.shape[1:]
    module = (
        rankup.models.mlp(shape.numel(), hidden=[16, 12])
        if net == "mlp"
        else rankup.models.resnet18(width=4, image_size=shape[-1], channels=1)
    )
    recipe = {"epochs": 1, "batch": 16, **recipe}
    stream, module = stream.to(device), module.to(device)
    return make_method(name, stream, module, options=options or {}, seed=seed, **recipe)


def after(method: Method, stream: Stream, learned: int) -> Any:
    """The learner of the next task, after some whose steps were skipped."""
    for task in stream.tasks[:learned]:
        method.begin(task)
        method.end()
    learner = method.begin(stream[learned])
    assert isinstance(learner, ReplayLearner)
    return learner


def entry(learner: ReplayLearner, step: int = 0, seed: int = 0) -> dict[str, Tensor]:
    """What is drawn for a step."""
    drawn = learner.sample_epoch(torch.Generator().manual_seed(seed))
    return {name: entries[step] for name, entries in drawn.items()}


def gradient(learner: ReplayLearner, draw: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    with learner.bound({}):
        loss, grads = learner.gradient(draw)
    return loss, list(grads)


def answer(of: Any, x: Tensor, task: int) -> Tensor:
    """A plain MLP's answers from one head."""
    body = of.body
    x = x.flatten(1)
    for layer in body.hidden:
        x = torch.relu(x @ layer.weight.T + layer.bias)
    rows = body.head.slices[task]
    return x @ body.head.weight[rows].T + body.head.bias[rows]


def cross_entropies(learner: ReplayLearner, x: Tensor, y: Tensor, tasks: Tensor) -> Tensor:
    """Each sample's own loss, under its own head."""
    return torch.stack(
        [
            -answer(learner, x[i : i + 1], int(tasks[i])).log_softmax(1)[0, int(y[i])]
            for i in range(len(x))
        ]
    )

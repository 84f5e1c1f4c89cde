"""Small streams, networks and methods to test."""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from rankup import models
from rankup.data.streams import Stream, make_stream
from rankup.growing.options import GrowOptions
from rankup.methods import method_class, method_info, method_options
from rankup.methods.base import Method, Setting
from rankup.rank import Rank
from rankup.training.batches import Feed
from rankup.training.evaluate import fraction_correct
from rankup.training.recipe import Recipe

CPU = torch.device("cpu")


def convnet() -> nn.Module:
    """Two convolutions with batch norms."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48, 10),
    )


NETS = {"mlp": lambda: models.mlp(64, hidden=[32, 32]), "convnet": convnet}


@cache
def split_digits(tasks: int = 5) -> Stream:
    """The first tasks of two digits each."""
    return make_stream("s-digits").first(tasks)


def make_method(
    name: str,
    stream: Stream,
    module: nn.Module | None = None,
    *,
    options: Mapping[str, Any] = MappingProxyType({}),
    rank: Rank = Rank(3, 1),  # noqa: B008
    seed: int = 0,
    **recipe: Any,
) -> Method:
    """A method about to learn a stream, by its own recipe but for what is given."""
    chosen = Recipe(**{"epochs": 3, "batch": 32, **method_info(name).recipe, **recipe})
    net, growth = module or NETS["mlp"](), GrowOptions(rank, seed=seed)
    setting = Setting(net, growth, chosen, seed, stream.tasks, method_options(name, options))
    return method_class(name)(setting)


def learn(method: Method, stream: Stream, tasks: int) -> None:
    """Learn until this many tasks are learned; a method that is not continual learns all."""
    while method.learned < tasks:
        method.learn(stream[method.learned], None, None)


def answers(method: Method, stream: Stream, task: int) -> Tensor:
    """Logits for a task's first test samples."""
    x = next(Feed(stream[task], method.recipe, CPU).test())[0]
    with torch.no_grad():
        return method.predict(x, task)


def accuracy(method: Method, stream: Stream, task: int) -> float:
    """The share of a task's test samples that are answered right."""
    feed = Feed(stream[task], method.recipe, CPU)
    return fraction_correct(lambda x: method.predict(x, task), feed.test())

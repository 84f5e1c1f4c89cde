"""Traces: what a module computes matters, not how it is written."""

import random
import threading
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

import rankup
from helpers.zoo import assert_same_bits, blobs, inputs, relative_error, taught, teach
from rankup.layers import FactoredConv2d, FactoredLinear, TaskHead, TaskNorm
from rankup.rank import Rank
from rankup.seeds import rng_states
from rankup.training.batches import Feed
from rankup.training.engine.mlp import is_chain
from rankup.training.recipe import Recipe


class Conv3x3(nn.Conv2d):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 3, padding=1)


class OwnNorm(nn.BatchNorm2d):
    pass


class OwnLinear(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)


def with_own_classes() -> nn.Sequential:
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(
        Conv3x3(1, 4), OwnNorm(4), nn.ReLU(), pooled, OwnLinear(4, 5), nn.ReLU(), OwnLinear(5, 3)
    ).double()


def test_derived_class_with_its_own_init_is_replaced() -> None:
    net = rankup.grow(with_own_classes(), Rank(2, 1))
    found = [type(net.body[place]) for place in (0, 1, 4, 6)]
    assert found == [FactoredConv2d, TaskNorm, FactoredLinear, TaskHead]
    x = torch.randn(8, 1, 6, 6, dtype=torch.float64)
    teach(net, "a", x)
    plain = net.merged("a", fold=True)
    assert isinstance(plain[1], nn.Identity)
    assert relative_error(plain(x), net.eval()(x, task="a")) < 1e-10


def test_grow_draws_nothing_from_the_callers_generators() -> None:
    class Spelled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return nn.functional.linear(input, self.weight, self.bias)

    module, before = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Spelled(8, 3)), rng_states()
    rankup.grow(module, Rank(2, 1))
    assert rng_states() == before


@pytest.mark.parametrize("options", [{"last": 1}, {"include": "4"}])
def test_derived_class_may_be_left_dense(options: dict[str, object]) -> None:
    net = rankup.grow(with_own_classes(), Rank(2, 1), **options)
    x = torch.randn(8, 1, 6, 6, dtype=torch.float64)
    teach(net, "a", x)
    assert isinstance(net.body[0], Conv3x3)
    plain = net.merged("a", fold=True)
    assert isinstance(plain[1], nn.Identity)
    assert relative_error(plain(x), net.eval()(x, task="a")) < 1e-10


class Scored(nn.Module):
    """A convolution that is read by more than the norm after it."""

    def __init__(self, reader: str) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.hidden, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.reader = reader

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        z = self.norm(y) if self.reader != "flag" else y
        if self.reader == "sum":
            z = z + y
        elif self.reader == "evaluation":
            z = z if self.training else z + y.abs().mean()
        elif self.reader == "weight":
            z = z + self.conv.weight.mean()
        elif self.reader == "attribute":
            self.kept = {"conv": [y]}
        return self.head(self.hidden(z.tanh().mean((2, 3))).tanh())


@pytest.mark.parametrize("reader", ["sum", "evaluation", "weight", "attribute", "hook"])
def test_norm_is_not_folded_if_more_reads_the_convolution(reader: str) -> None:
    module = Scored(reader).double()
    if reader == "hook":
        module.conv.register_forward_hook(lambda conv, inputs, y: 2 * y)
    net = rankup.grow(module, Rank(2, 1), exclude="conv")
    x = torch.randn(8, 1, 6, 6, dtype=torch.float64)
    teach(net, "a", x)
    plain = net.merged("a", fold=True)
    assert isinstance(plain.norm, nn.BatchNorm2d)
    assert relative_error(plain(x), net.eval()(x, task="a")) < 1e-10
    if reader == "attribute":
        assert relative_error(plain.kept["conv"][0], net.body.kept["conv"][0]) < 1e-10


def test_norm_is_not_folded_once_the_module_takes_another_path() -> None:
    x = torch.randn(8, 1, 6, 6, dtype=torch.float64)
    net = rankup.grow(Scored("norm").double(), Rank(2, 1))
    teach(net, "a", x)
    assert isinstance(net.merged("a", fold=True).norm, nn.Identity)
    net.body.reader = "flag"
    assert relative_error(net.merged("a", fold=True)(x), net.eval()(x, task="a")) < 1e-10


class Choosing(nn.Module):
    """Takes another path with each of its options."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.embed, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Any = None, raw: Any = None, embed: bool = False) -> Tensor:
        y = self.conv(x)
        if raw is None or mask is not None:
            y = self.norm(y)
        features = (y if mask is None else y * mask).relu().mean((2, 3))
        return self.embed(features) if embed else self.head(features)


def test_module_with_options_is_traced_without_and_merged_with_them() -> None:
    net = rankup.grow(Choosing().double(), Rank(2, 1))
    assert isinstance(net.body.head, TaskHead)  # so None was None: torch.fx has a stand-in for it
    x = torch.randn(8, 1, 6, 6, dtype=torch.float64) + 2
    teach(net, "a", x)
    plain = net.eval().merged("a", fold=True)
    for options in ({}, {"mask": 2.0}, {"raw": 1}, {"mask": 2.0, "raw": 1}):
        assert relative_error(plain(x, **options), net(x, task="a", **options)) < 1e-10


COINS = {
    "torch": lambda: bool(torch.rand(()) < 0.5),
    "python": lambda: random.random() < 0.5,
    "numpy": lambda: np.random.rand() < 0.5,  # noqa: NPY002
}


@pytest.mark.parametrize("coin", COINS)
def test_random_path_is_not_taken_for_constant(coin: str) -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x).relu()
            if not self.training or COINS[coin]():
                x = self.b(x).relu()
            return self.head(x)

    module = Dropped()
    before = rng_states()
    net = rankup.grow(module, Rank(2, 1))
    assert net.plan.paths[0] is None
    assert net.plan.paths[1] is not None
    assert net.plan.chain is None
    assert rng_states() == before


class Interrupted(nn.Module):
    """Lets another thread work in the middle of a trace."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self.hidden, self.head, self.work = nn.Linear(9, 8), nn.Linear(8, 3), work

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, fx.Proxy):
            thread = threading.Thread(target=self.work)
            thread.start()
            thread.join()
        return self.head(self.hidden(x).relu())


def test_threads_answer_while_a_module_is_traced() -> None:
    """Also those that run the very module that a network is grown from."""
    net, x, answers = taught("mlp", tasks=[3]), inputs("mlp"), list[Tensor]()
    module = Interrupted(lambda: answers.extend([net(x, task=0), module(x)]))
    rankup.grow(module, Rank(2, 1))
    assert len(answers) == 2 * 3  # in training, in evaluation, and with task layers
    assert_same_bits(3 * [net(x, task=0), module(x)], answers)


Reshape = Callable[[Tensor], Tensor]

FLATTENING: dict[str, Reshape] = {
    "torch": lambda x: torch.flatten(x, 1),
    "torch, named": lambda x: torch.flatten(input=x, start_dim=1, end_dim=-1),
    "to the last": lambda x: x.flatten(1, -1),
    "named": lambda x: x.flatten(start_dim=1),
    "view by size": lambda x: x.view(x.size(0), -1),
    "view by a named size": lambda x: x.view((x.size(dim=0), -1)),
    "view by sizes": lambda x: x.view(x.size()[0], -1),
    "view by shape": lambda x: x.view(x.shape[0], -1),
    "view by length": lambda x: x.view(len(x), -1),
    "view to numbers": lambda x: x.view(-1, 12),
    "reshape by shape": lambda x: x.reshape(x.shape[0], -1),
    "reshape to numbers": lambda x: x.reshape([len(x), 12]),
    "torch, reshape": lambda x: torch.reshape(x, (x.shape[0], -1)),
    "a class": type("OwnFlatten", (nn.Flatten,), {})(),
}

NOT_FLATTENING: dict[str, Reshape] = {
    "from the batch on": lambda x: x.flatten(),
    "up to a dimension": lambda x: x.flatten(1, 2),
    "the last two": lambda x: x.flatten(-2),
    "as many as channels": lambda x: x.reshape(x.shape[1], -1),
    "so many samples": lambda x: x.view(60, -1),
    "another's samples": lambda x: x.view(x.mT.shape[0], -1),
    "turned": lambda x: x.mT.reshape(x.shape[0], -1),
    "three dimensions": lambda x: x.view(x.shape[0], -1, 12),
    "read beside": lambda x: x.flatten(1) + x.mean(),
    "a size read beside": lambda x: x.view(x.shape[0], -1) / x.shape[0],
}


class Stages(nn.Module):
    """Keeps what its layers compute in a list, and looks at how long that is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([nn.Linear(4, 4)] * 2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        stages = [x.view(len(x), -1)]
        while len(stages) <= len(self.layers):
            stages.append(self.layers[len(stages) - 1](stages[-1]))
        return self.head(sum(stages[i] for i in range(len(stages))))


def test_length_of_a_list_of_tensors_is_a_number() -> None:
    assert rankup.grow(Stages(), Rank(2, 1)).plan.paths[0] is not None


class Flattened(nn.Module):
    def __init__(self, flatten: Reshape) -> None:
        super().__init__()
        self.flatten = flatten
        self.a, self.b, self.head = nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(self.flatten(x)).relu()).relu())


@pytest.mark.parametrize("form", FLATTENING)
def test_flattening_is_recognised(form: str) -> None:
    x = torch.randn(5, 3, 4)
    assert torch.equal(FLATTENING[form](x), x.flatten(1))
    net = rankup.grow(Flattened(FLATTENING[form]), Rank(2, 1))
    assert net.plan.chain == ("a", "b")
    assert net.plan.first == "a"
    assert isinstance(len, BuiltinFunctionType)  # Python's own again


@pytest.mark.parametrize("form", NOT_FLATTENING)
def test_other_reshaping_is_not_taken_for_flattening(form: str) -> None:
    net = rankup.grow(Flattened(NOT_FLATTENING[form]), Rank(2, 1))
    assert net.plan.chain is None
    assert net.plan.first is None


def test_view_that_splits_samples_is_no_chain() -> None:
    net = rankup.grow(Flattened(FLATTENING["view to numbers"]), Rank(2, 1))
    net.begin_task("open", 3)
    whole, twice = (Feed(blobs(0, size), Recipe(), net.device) for size in (12, 24))
    assert is_chain(net, whole)
    assert not is_chain(net, twice)

"""It does not matter how a module is written, only what it computes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import rankup
from helpers.zoo import blobs, relative_error, teach
from rankup.layers import FactoredConv2d, FactoredLinear, TaskHead, TaskNorm
from rankup.rank import Rank
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


def test_classes_that_only_say_how_a_layer_is_made_are_that_layer() -> None:
    net = rankup.grow(with_own_classes(), Rank(2, 1))
    found = [type(net.body[place]) for place in (0, 1, 4, 6)]
    assert found == [FactoredConv2d, TaskNorm, FactoredLinear, TaskHead]
    x = torch.randn(8, 1, 6, 6, dtype=torch.float64)
    teach(net, "a", x)
    plain = net.merged("a")
    assert isinstance(plain[1], nn.Identity)
    assert relative_error(plain(x), net.eval()(x, task="a")) < 1e-10


@pytest.mark.parametrize("options", [{"last": 1}, {"include": "4"}])
def test_layers_of_such_classes_may_be_left_dense(options: dict[str, object]) -> None:
    net = rankup.grow(with_own_classes(), Rank(2, 1), **options)
    x = torch.randn(8, 1, 6, 6, dtype=torch.float64)
    teach(net, "a", x)
    assert isinstance(net.body[0], Conv3x3)
    plain = net.merged("a")
    assert isinstance(plain[1], nn.Identity)
    assert relative_error(plain(x), net.eval()(x, task="a")) < 1e-10


class Doubling(nn.Conv2d):
    def _conv_forward(self, *args: object) -> Tensor:
        return 2 * super()._conv_forward(*args)


class DoublingWhenCalled(nn.Conv2d):
    def __call__(self, x: Tensor) -> Tensor:
        return 2 * super().__call__(x)


class Scaled(nn.Conv2d):
    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.register_buffer("scale", torch.ones(1))


class Holding(nn.Conv2d):
    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.activation = nn.PReLU()


def doubling_alone() -> nn.Conv2d:
    made = Conv3x3(1, 4)
    made.forward = lambda x: 2 * nn.Conv2d.forward(made, x)
    return made


@pytest.mark.parametrize(
    "conv",
    [
        lambda: Doubling(1, 4, 1),
        lambda: DoublingWhenCalled(1, 4, 1),
        lambda: Scaled(1, 4, 1),
        lambda: Holding(1, 4, 1),
        doubling_alone,
    ],
    ids=["_conv_forward", "__call__", "buffer", "module", "its own forward"],
)
def test_a_class_that_computes_or_holds_more_is_not_taken_for_its_kind(conv: object) -> None:
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    module = nn.Sequential(conv(), nn.BatchNorm2d(4), pooled, nn.Linear(4, 3))
    with pytest.raises(rankup.RankupError, match="cannot factor '0' .* is not a plain Conv2d"):
        rankup.grow(module, Rank(2, 1))


class Scored(nn.Module):
    """A convolution that is read by more than the norm after it."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.hidden, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.reads, self.calls = reads, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.conv(x)
        z = self.norm(y)
        if self.reads == "its answers":
            z = z if self.training else z + y.abs().mean()
        elif self.reads == "now and then":
            z = z if self.calls % 2 else z + y.abs().mean()
        elif self.reads == "its weight":
            z = z + self.conv.weight.mean()
        return self.head(self.hidden(z.tanh().mean((2, 3))).tanh())


def doubled(conv: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return 2 * output


@pytest.mark.parametrize("reads", ["its answers", "now and then", "its weight", "a hook"])
def test_a_batch_norm_is_not_folded_where_more_looks_at_the_convolution(reads: str) -> None:
    module = Scored(reads).double()
    if reads == "a hook":
        module.conv.register_forward_hook(doubled)
    net = rankup.grow(module, Rank(2, 1), exclude="conv")
    x = torch.randn(8, 1, 6, 6, dtype=torch.float64)
    teach(net, "a", x)
    plain = net.merged("a")
    for _ in range(2):
        assert relative_error(plain(x), net.eval()(x, task="a")) < 1e-10


class Watched(nn.Module):
    """Keeps what its convolution computes, and can do without its norm."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.hidden, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.keeps, self.norms = keeps, True

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.keeps:
            self.kept = {"conv": [y]}
        y = self.norm(y) if self.norms else y
        return self.head(self.hidden(y.tanh().mean((2, 3))).tanh())


def test_a_batch_norm_is_not_folded_into_what_the_module_keeps() -> None:
    x = torch.randn(8, 1, 6, 6, dtype=torch.float64)
    net = rankup.grow(Watched(keeps=True).double(), Rank(2, 1))
    teach(net, "a", x)
    plain = net.merged("a")
    assert relative_error(plain(x), net.eval()(x, task="a")) < 1e-10
    assert relative_error(plain.kept["conv"][0], net.body.kept["conv"][0]) < 1e-10


def test_a_batch_norm_is_not_folded_once_the_module_goes_another_way() -> None:
    x = torch.randn(8, 1, 6, 6, dtype=torch.float64)
    net = rankup.grow(Watched(keeps=False).double(), Rank(2, 1))
    teach(net, "a", x)
    assert isinstance(net.merged("a").norm, nn.Identity)
    net.body.norms = False
    assert relative_error(net.merged("a")(x), net.eval()(x, task="a")) < 1e-10


class Choosing(nn.Module):
    """Takes another path if it is given an option.

    Args:
        usual: whether the batch norm sees the output of a ReLU without the option or with it.
    """

    def __init__(self, usual: bool) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.embed, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.usual = usual

    def forward(self, x: Tensor, mask: Tensor | None = None, embed: bool = False) -> Tensor:
        y = self.conv(x)
        if (mask is None) == self.usual:
            y = y.relu()
        features = self.norm(y).mean((2, 3))
        answer: Tensor = self.embed(features) if embed else self.head(features)
        return answer


@pytest.mark.parametrize("usual", [True, False])
def test_a_module_is_read_as_it_runs_without_options_and_with_them(usual: bool) -> None:
    """By itself, torch.fx does not treat an argument that is None by default as None."""
    net = rankup.grow(Choosing(usual).double(), Rank(2, 1))
    assert isinstance(net.body.head, TaskHead)
    x = torch.randn(8, 1, 6, 6, dtype=torch.float64)
    teach(net, "a", x)
    plain = net.merged("a")
    for options in ({}, {"mask": x}):
        assert relative_error(plain(x, **options), net.eval()(x, task="a", **options)) < 1e-10


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


class Flattened(nn.Module):
    def __init__(self, flatten: Reshape) -> None:
        super().__init__()
        self.flatten = flatten
        self.a, self.b, self.head = nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(self.flatten(x)).relu()).relu())


@pytest.mark.parametrize("way", FLATTENING)
def test_samples_may_be_flattened_in_any_way(way: str) -> None:
    x = torch.randn(5, 3, 4)
    assert torch.equal(FLATTENING[way](x), x.flatten(1))
    net = rankup.grow(Flattened(FLATTENING[way]), Rank(2, 1))
    assert net.plan.chain == ("a", "b")
    assert net.plan.first == "a"
    assert "len" not in globals()  # is Python's own again


@pytest.mark.parametrize("way", NOT_FLATTENING)
def test_what_may_do_more_than_flatten_is_not_taken_for_it(way: str) -> None:
    net = rankup.grow(Flattened(NOT_FLATTENING[way]), Rank(2, 1))
    assert net.plan.chain is None
    assert net.plan.first is None


def test_a_view_that_takes_samples_apart_is_no_chain_for_them() -> None:
    net = rankup.grow(Flattened(FLATTENING["view to numbers"]), Rank(2, 1))
    net.begin_task("open", 3)
    whole, twice = (Feed(blobs(0, size), Recipe(), net.device) for size in (12, 24))
    assert is_chain(net, whole)
    assert not is_chain(net, twice)

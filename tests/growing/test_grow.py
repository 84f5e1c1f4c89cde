"""Growing of modules: all layers, the last ones, or those that can be factored."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rankup
from helpers.zoo import (
    KINDS,
    RANKS,
    Transformer,
    assert_same_bits,
    inputs,
    logits,
    module,
    relative_error,
    taught,
    teach,
)
from rankup.layers import FactoredLayer, TaskHead, TaskLayer, TaskNorm, active
from rankup.rank import Rank


@pytest.mark.parametrize("kind", KINDS)
def test_given_module_is_not_modified(kind: str) -> None:
    given = module(kind)
    state = copy.deepcopy(given.state_dict())
    kinds = [type(layer) for layer in given.modules()]
    for base in ("new", "keep"):
        net = rankup.grow(given, Rank(2, 1), base=base)
        teach(net, "a", inputs(kind), steps=1)
        assert [type(layer) for layer in given.modules()] == kinds
        assert all(torch.equal(state[key], value) for key, value in given.state_dict().items())
        pointers = {tensor.data_ptr() for tensor in given.state_dict().values() if tensor.numel()}
        assert pointers.isdisjoint(b.data_ptr() for b in net.buffers() if b.numel())


def test_layer_used_twice_stays_one_layer() -> None:
    net = taught("head_first")
    assert isinstance(net.body.again, FactoredLayer)
    assert net.body.same is net.body.again
    plain = net.merged(0)
    assert plain.same is plain.again


def test_head_is_the_linear_that_runs_last() -> None:
    assert isinstance(rankup.grow(module("head_first"), Rank(2, 1)).body.head, TaskHead)


def factored_layers(net: rankup.IncrementalNet) -> list[str]:
    layers = net.body.named_modules()
    return [name for name, layer in layers if isinstance(layer, FactoredLayer)]


def test_include_chooses_layers_by_name() -> None:
    net = rankup.grow(Transformer(), Rank(2, 1), include="attention.*")
    factored = [
        name for name, layer in net.body.named_modules() if isinstance(layer, FactoredLayer)
    ]
    assert factored == ["attention.qkv", "attention.out"]
    assert isinstance(net.body.mlp[0], nn.Linear)


def features(net: nn.Module, x: Tensor, **task: object) -> Tensor:
    """What reaches the head."""
    seen: list[Tensor] = []
    hook = net.get_submodule("body.head" if task else "head").register_forward_pre_hook(
        lambda _, args: seen.append(args[0])
    )
    net(x, **task)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("rank", RANKS.values(), ids=RANKS)
def test_kept_module_starts_as_it_was_and_goes_on_learning(rank: Rank) -> None:
    given = module("transformer")
    x = inputs("transformer")
    net = rankup.grow(given, rank, base="keep")
    for task in range(2):
        net.begin_task(f"{task}", 3)
        torch.testing.assert_close(features(net, x, task=task), features(given, x))
        net.abandon_task()
        teach(net, f"{task}", x, steps=30)
        labels = torch.randint(3, (6,), generator=torch.Generator().manual_seed(1))
        assert torch.equal(net(x, task=task).argmax(1), labels)


def test_norm_that_leaves_epsilon_to_torch_computes_the_same(tmp_path: Path) -> None:
    dtype = torch.bfloat16
    layers = nn.Linear(8, 16), nn.RMSNorm(16), nn.ReLU(), nn.Linear(16, 3)
    given = nn.Sequential(*layers).to(dtype)
    net = rankup.grow(given, Rank(2, 1), base="keep")
    x = 1e-3 * torch.randn(4, 16, generator=torch.Generator().manual_seed(0))  # epsilon matters
    x = x.to(dtype)
    expected = given[1](x)
    net.begin_task("a", 3)
    with active(0):
        assert torch.equal(net.body[1](x), expected)
    net.commit_task()
    rankup.save(net, tmp_path / "net")
    for same in (net, rankup.load(tmp_path / "net", given)):
        with active(0):
            assert torch.equal(same.body[1](x), expected)
        with active(torch.zeros(4, dtype=torch.long)):
            torch.testing.assert_close(same.body[1](x), expected)
        assert torch.equal(same.merged("a")[1](x), expected)


@pytest.mark.parametrize("base", ["new", "keep"])
def test_last_factors_last_layers_and_rest_stays_constant(base: str) -> None:
    given = module("resnet18")
    x = inputs("resnet18")
    net = rankup.grow(given, Rank(2, 1), last=3, base=base)
    factored = [
        name for name, layer in net.body.named_modules() if isinstance(layer, FactoredLayer)
    ]
    # In the order in which they run, the shortcut of a block is computed after its convolutions.
    assert factored == ["blocks.6.shortcut.0", "blocks.7.conv1", "blocks.7.conv2"]
    teach(net, "one", x)
    assert net.size(task="one").dense > 0 or base == "keep"
    state = {k: v.clone() for k, v in net.state_dict().items() if k.startswith("body.blocks.2")}
    assert state
    before = logits(net.eval(), x)
    teach(net.train(), "two", x + 1)
    assert_same_bits(before, logits(net.eval(), x))
    assert net.size(task="two").dense == 0
    norms = [part for part in net.body.modules() if isinstance(part, TaskNorm)]
    per_task = [norm.spec.name for norm in norms if not norm.spec.shared]
    assert per_task == ["blocks.6.shortcut.1", "blocks.7.norm1", "blocks.7.norm2"]
    assert net.size(task="two").norms == 3 * 4 * 32
    for key, value in net.state_dict().items():
        if key in state:
            assert torch.equal(value, state[key])
    if base == "keep":
        assert torch.equal(net.body.stem.weight, given.stem.weight)
        assert torch.equal(net.body.norm.running_mean, given.norm.running_mean)
    plain = net.merged("two")
    torch.testing.assert_close(plain(x), net(x, task="two"), rtol=1e-4, atol=1e-4)
    assert {name for name, _ in plain.named_parameters()} >= {"stem.weight", "head.weight"}
    mixed = net(x, task=torch.tensor([0, 1] * 3))
    torch.testing.assert_close(mixed[1], net(x, task="two")[1], rtol=1e-4, atol=1e-4)


class Mixture(nn.Module):
    """Parts that cannot be factored: a recurrent layer, attention, an embedding of its own, a
    grouped convolution, a norm with running averages."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(4, 6))
        self.into = nn.Linear(5, 6)
        self.rnn = nn.LSTM(6, 6, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.grouped = nn.Conv2d(2, 4, 1, groups=2)
        self.running = nn.InstanceNorm3d(1, affine=True, track_running_stats=True)
        self.head = nn.Linear(6, 3)
        self.register_buffer("scale", torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x) + self.position
        x = self.running(x[:, None, None])[:, 0, 0]
        x, _ = self.rnn(x)
        x = x + self.attention(x, x, x)[0]
        x = x * self.grouped(x[:, :2, :, None]).mean((1, 3))[:, None]
        return self.head(x.mean(1) * self.scale)


LEFT_DENSE = ["position", "rnn", "attention", "grouped", "running"]


@pytest.mark.parametrize("base", ["new", "keep"])
def test_excluded_layers_learn_with_first_task_only(base: str, tmp_path: object) -> None:
    given = Mixture()
    x = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(1))
    net = rankup.grow(given, Rank(2, 1), exclude=LEFT_DENSE, base=base)
    dense = {name.removeprefix("body.") for name, _ in net.named_buffers()}
    assert {"rnn.weight_ih_l0", "position", "running.running_mean", "scale"} <= dense
    start = net.body.rnn.weight_hh_l0.clone()
    net.begin_task("one", 3)
    trained = {name.removeprefix("body.") for name, _ in net.named_parameters()}
    assert ("rnn.weight_ih_l0" in trained) == (base == "new")
    net.abandon_task()
    teach(net.train(), "one", x)
    assert torch.equal(net.body.rnn.weight_hh_l0, start) == (base == "keep")
    assert torch.equal(net.body.rnn.weight_hh_l0, given.rnn.weight_hh_l0) == (base == "keep")
    before = logits(net.eval(), x)
    for index in range(2):
        teach(net.train(), f"more {index}", x + 3)
    net.train()
    net(x + 5, task="one")
    assert_same_bits(before, logits(net.eval(), x))
    plain = net.merged("one")
    torch.testing.assert_close(plain(x), before[0], rtol=1e-5, atol=1e-6)
    rankup.save(net, tmp_path / "net")
    again = rankup.load(tmp_path / "net", Mixture()).eval()
    assert_same_bits(logits(net, x), logits(again, x))


def test_abandoning_first_task_restores_buffers() -> None:
    given = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 3))
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    net = rankup.grow(given, Rank(2, 1), exclude="1").train()
    start = net.body[1].running_mean.clone()
    teach(net, "tried", x, commit=False)
    assert not torch.equal(net.body[1].running_mean, start)
    net.abandon_task()
    assert torch.equal(net.body[1].running_mean, start)
    # What a committed task leaves in them stays.
    teach(net, "one", x, commit=False)
    moved = net.body[1].running_mean.clone()
    net.commit_task()
    assert torch.equal(net.body[1].running_mean, moved)
    assert not torch.equal(moved, start)


def test_tied_dense_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
            self.two.weight = self.one.weight
            self.three, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.three(self.two(self.one(x).relu()).relu()).relu())

    net = rankup.grow(Tied(), Rank(2, 1), exclude=["one", "two"])
    start = net.body.one.weight.clone()
    x = torch.randn(6, 6)
    teach(net, "a", x)
    assert not torch.equal(net.body.one.weight, start)
    assert torch.equal(net.body.one.weight, net.body.two.weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rank", "base"), [("learned", "new"), ("with seeded", "keep")])
def test_merged_is_a_plain_module_that_computes_the_same(kind: str, rank: str, base: str) -> None:
    net = taught(kind, (3, 2), RANKS[rank], base=base, dtype=torch.float64)
    x = inputs(kind, batch=5, seed=3, dtype=torch.float64)
    before = logits(net, x)
    for task in net.tasks:
        plain = net.merged(task)
        assert relative_error(plain(x), net(x, task=task)) < 1e-10
        assert not any(isinstance(layer, TaskLayer) for layer in plain.modules())
        # Weights of its own: training them leaves the network alone.
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.add_(1)
        assert_same_bits(before, logits(net, x))


def test_merged_folds_norms_after_convolutions_only() -> None:
    def norms_left(kind: str) -> int:
        plain = taught(kind, [3]).merged(0, fold=True)
        return sum(isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) for layer in plain.modules())

    assert norms_left("resnet18") == 0
    assert norms_left("convolutions") == 1  # a Linear's channels may be another dimension


def test_kept_module_may_be_in_channels_last() -> None:
    given = module("resnet18")
    plain = rankup.grow(given, Rank(2, 1), base="keep")
    last = rankup.grow(given.to(memory_format=torch.channels_last), Rank(2, 1), base="keep")
    for one, other in zip(plain.parts, last.parts, strict=True):
        for key, tensor in one.base().items():
            assert torch.equal(tensor, other.base()[key])


class Bracketed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"c[0]": nn.Embedding(4, 5)})
        self.hidden, self.head = nn.Linear(5, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(self.hidden(self.parts["c[0]"](x)).relu())
        return answer


def test_name_with_brackets_matches_itself() -> None:
    assert rankup.grow(Bracketed(), Rank(2, 1), exclude="parts.c[0]").plan.dense.trained


def test_container_may_have_expanded_buffer() -> None:
    module = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2))
    module.register_buffer("mask", torch.ones(4, 4).tril().expand(2, 4, 4))
    net = rankup.grow(module, Rank(2, 1))
    assert torch.equal(net.body.mask, module.mask)

"""Fitting of modules that do more than run their layers."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import rankup
from helpers.own_modules import (
    RECIPE,
    Untracked,
    halves,
    mlp,
    right,
)
from helpers.zoo import assert_same_bits
from rankup.rank import Rank
from rankup.training import batches


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        x -= 0.5
        return self.layers(x.flip(1))


def test_module_that_writes_to_inputs_leaves_tasks_alone() -> None:
    net, task = rankup.grow(InPlace(), Rank(2, 1)), halves()
    given = task.train_x.clone(), task.test_x.clone()
    for number in range(2):
        rankup.fit(net, replace(task, name=f"{number}"), RECIPE)
    reached = [rankup.accuracy(net, replace(task, name=f"{n}")) for n in (0, 1, 0, 1)]
    assert reached[:2] == reached[2:]
    assert min(reached) > 0.9
    assert torch.equal(task.train_x, given[0])
    assert torch.equal(task.test_x, given[1])
    mixed = net.eval()(task.test_x.clone(), task=[0] * len(task.test_x))
    torch.testing.assert_close(mixed, net(task.test_x.clone(), task=0))


@pytest.mark.parametrize("unused", [nn.BatchNorm1d(16), nn.Linear(3, 3)])
def test_chain_may_hold_layers_it_never_runs(unused: nn.Module) -> None:
    class Chain(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[2](self[1](self[0](x)))

    net = rankup.grow(Chain(*mlp()).append(unused), Rank(2, 1), head="2")
    for index in range(2):
        rankup.fit(net, replace(halves(), name=f"{index}"), RECIPE)
        assert right(net, halves(), index) > 0.9


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))


@pytest.mark.parametrize(("make", "precision"), [(mlp, "float32"), (normed, "bfloat16")])
def test_task_is_learned_alike_in_all_modes_of_torch(
    make: Callable[[], nn.Module], precision: str
) -> None:
    answers, task, recipe = [], halves(), replace(RECIPE, precision=precision)
    for mode in (nullcontext(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16)):
        torch.manual_seed(0)
        module = make()
        with mode:
            net = rankup.grow(module, Rank(2, 1))
            rankup.fit(net, task, recipe)
            net.begin_task("by hand", 2)
            net.commit_task(calibrate=[task.train_x])
        rankup.fit(net, replace(task, name="later"), recipe)
        answers.append([net.eval()(task.test_x, name) for name in (task.name, "later")])
    for other in answers[1:]:
        assert_same_bits(answers[0], other)


class Scaled(nn.Module):
    """A chain of layers and nothing else, unless it is told to do more."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.share = 1.0, 0.0
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x if self.scale == 1 else self.scale * x))
        x = nn.functional.dropout(x, self.share, self.training) if self.share else x
        return self.layers[2](x)


@pytest.mark.parametrize("change", [{"scale": -2.0}, {"share": 0.3}])
def test_module_changed_after_growing_learns_as_it_is_now(
    change: dict[str, float],
) -> None:
    answers = []
    for before in (True, False):
        torch.manual_seed(0)
        module = Scaled()
        if before:
            vars(module).update(change)
        net = rankup.grow(module, Rank(2, 1))
        assert (net.plan.chain is None) == before
        if not before:
            vars(net.body).update(change)
        for number in range(2):
            rankup.fit(net, replace(halves(), name=f"{number}"), RECIPE)
        answers.append(net.eval()(halves().test_x, 1))
    torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-4)


class BlindWhileLearning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x * 0 if self.training else x)


def test_path_of_training_mode_is_learned() -> None:
    net = rankup.grow(BlindWhileLearning().eval(), Rank(2, 1), seed=5)
    with pytest.raises(rankup.TaskFailed, match="was not learned"):
        rankup.fit(net, halves(), RECIPE)


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("absent", None)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.mixing = nn.Linear(12, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 3, 4)
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.mixing(x.flatten(1)).relu())


def test_dense_weights_start_from_the_seed_alone() -> None:
    one, same, other = (
        rankup.grow(Attentive(), Rank(2, 1), exclude="attention", seed=seed) for seed in (5, 5, 6)
    )
    weight = one.body.attention.in_proj_weight
    assert torch.equal(weight, same.body.attention.in_proj_weight)
    assert not torch.equal(weight, other.body.attention.in_proj_weight)


def test_norms_never_see_a_batch_of_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_CHUNK", 64)
    normed = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    task = halves(65)
    assert right(rankup.fit(rankup.grow(normed, Rank(2, 1)), task, RECIPE), task) > 0.9


def test_norm_without_tensors_has_statistics_per_task() -> None:
    net = rankup.grow(Untracked(), Rank(2, 1))
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(0))
    for name in "ab":
        net.begin_task(name, 2)
        net.commit_task(calibrate=[x])
    alone = torch.cat([net(x[:3], task="a"), net(x[3:], task="b")])
    mixed = net(x, task=torch.tensor([0, 0, 0, 1, 1, 1]))
    torch.testing.assert_close(mixed, alone)
    torch.testing.assert_close(net(x[:1], task="a"), alone[:1])


class Tokens(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8, sparse=sparse)
        self.layer, self.head = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(x).mean(1)).relu())


def test_token_indices_reach_embeddings_with_sparse_gradients_too() -> None:
    x = torch.randint(20, (200, 5), generator=torch.Generator().manual_seed(0))
    y = (x < 10).sum(1).gt(2).long()
    task, answers = rankup.Task("tokens", 2, x, y, x, y), []
    for sparse in (False, True):
        net = rankup.fit(rankup.grow(Tokens(sparse), Rank(4, 1), exclude="embedding"), task, RECIPE)
        assert right(net, task) > 0.9
        answers.append(net(x, task.name))
    assert torch.equal(*answers)
    # A Linear cannot take indices, and says so.
    with pytest.raises(rankup.RankupError, match=r"computes in torch.float32, got torch.int64"):
        rankup.fit(rankup.grow(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2)), Rank(2, 1)), task)


def test_repr_shows_what_layers_are() -> None:
    shown = repr(rankup.grow(rankup.models.resnet18(width=4), Rank(2, 1)))
    assert "FactoredConv2d(in=27, out=4, bias=False, kernel=(3, 3), stride=(1, 1), factors=0)" in (
        shown
    )
    assert "TaskHead(in=32, bias=True)" in shown
    assert "TaskNorm(batch2d, 4, weight=True, bias=True)" in shown


@pytest.mark.parametrize("pairs", [False, True])
def test_calibration_takes_dicts_and_options(pairs: bool) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.hidden = nn.BatchNorm1d(12), nn.Linear(12, 16)
            self.head = nn.Linear(16, 2)

        def forward(self, x: Tensor | dict[str, Tensor], scale: float = 1.0) -> Tensor:
            x = x["x"] if isinstance(x, dict) else x
            return self.head(self.hidden(scale * self.norm(x)).relu())

    x = halves().train_x
    net = rankup.grow(Two(), Rank(4, 1), head="head")
    net.begin_task("a", 2)
    net.commit_task(calibrate=[(x, {"scale": 2.0}) if pairs else {"x": x}])
    torch.testing.assert_close(net.body.norm.means[0], x.mean(0))


class Classy(nn.Module):
    """Has a parameter of its own, and initialises all its weights itself."""

    def __init__(self, *, by_hand: bool = False) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(12))
        self.hidden, self.head = nn.Linear(12, 16), nn.Linear(16, 2)
        self.reset_parameters = self.drawn_by if by_hand else self.drawn

    def drawn(self) -> None:
        nn.init.normal_(self.token)
        nn.init.xavier_uniform_(self.hidden.weight)
        self.head.reset_parameters()

    def drawn_by(self, deviation: float) -> None:
        nn.init.normal_(self.token, std=deviation)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x + self.token).relu())


def test_module_may_draw_weights_of_its_layers() -> None:
    one, other = (rankup.grow(Classy(), Rank(4, 1), exclude="token", head="head") for _ in range(2))
    assert float(one.body.token.norm()) > 1
    assert torch.equal(one.body.token, other.body.token)  # of the network's seed
    # One that cannot be drawn without arguments stays as it was given.
    given = rankup.grow(Classy(by_hand=True), Rank(4, 1), exclude="token", head="head")
    assert float(given.body.token.norm()) == 0


class Quiet(nn.Module):
    """Its `train` returns nothing, a common mistake, and its forward keeps what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(12, 16), nn.Linear(16, 2)
        self.features: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.features = [self.hidden(x).relu()]
        answer: Tensor = self.head(self.features[0])
        return answer

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)


def test_module_that_keeps_features_is_grown_merged_and_teaches() -> None:
    task, module = halves(), Quiet()
    module(task.train_x).sum().backward()
    net = rankup.grow(module, Rank(4, 1))
    assert net.plan.first == "hidden"  # so it was traced
    teacher = rankup.fit(net, task, RECIPE).merged(task.name)
    torch.testing.assert_close(teacher(task.test_x), net.eval()(task.test_x, task.name))
    assert not teacher.training
    teacher(task.train_x).sum().backward()
    student = rankup.fit(rankup.grow(Quiet(), Rank(4, 1)), task, RECIPE, teacher=teacher)
    assert rankup.accuracy(student, task) > 0.8


class Doubling(nn.Module):
    """Gives its head more digits than that computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(12, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x).relu().double())


def test_head_refuses_another_dtype() -> None:
    net = rankup.grow(Doubling(), Rank(4, 1))
    net.begin_task("a", 2)
    with pytest.raises(rankup.RankupError, match="'head' computes in torch.float32, got torch.flo"):
        net(torch.zeros(3, 12), task="a")

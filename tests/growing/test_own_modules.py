"""Modules that do more than run their layers can be fitted as they are."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
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
from rankup.rank import Rank
from rankup.training import batches
from rankup.training.recipe import Recipe


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        x -= 0.5
        return self.layers(x.flip(1))


def test_a_module_that_changes_its_inputs_changes_none_of_a_task() -> None:
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


@pytest.mark.parametrize("unused", [nn.LayerNorm(16), nn.BatchNorm1d(16), nn.Linear(3, 3)])
def test_a_chain_may_hold_what_it_never_runs(unused: nn.Module) -> None:
    class Chain(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[2](self[1](self[0](x)))

    net = rankup.grow(Chain(*mlp()).append(unused), Rank(2, 1), exclude="3", head="2")
    assert right(rankup.fit(net, halves(), RECIPE), halves(), 0) > 0.9


def test_sparse_gradients_are_learned_from() -> None:
    class Words(nn.Module):
        def __init__(self, sparse: bool) -> None:
            super().__init__()
            self.words = nn.Embedding(10, 8, sparse=sparse)
            self.hidden, self.head = nn.Linear(8, 16), nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.hidden(self.words(x).mean(1)).relu())

    draw = torch.Generator().manual_seed(0)
    x = torch.randint(10, (200, 5), generator=draw)
    y = (x < 3).any(1).long()
    task, answers = rankup.Task("words", 2, x, y, x, y), []
    for sparse in (False, True):
        torch.manual_seed(0)
        net = rankup.grow(Words(sparse), Rank(2, 1), exclude="words")
        answers.append(rankup.fit(net, task, RECIPE).eval()(x, "words"))
    assert torch.equal(*answers)


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))


MODES = {
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [mlp, normed])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_task_is_learned_alike_in_all_modes_of_torch(
    mode: str, make: Callable[[], nn.Module], precision: str
) -> None:
    answers, task, recipe = [], halves(), replace(RECIPE, precision=precision)
    for own in (nullcontext, MODES[mode]):
        torch.manual_seed(0)
        module = make()
        with own():
            net = rankup.grow(module, Rank(2, 1))
            rankup.fit(net, task, recipe)
            net.begin_task("own", 2)
            net.commit_task(calibrate=[task.train_x])
        rankup.fit(net, replace(task, name="later"), recipe)
        answers.append([net.eval()(task.test_x, number) for number in (0, 2)])
    for one, other in zip(*answers, strict=True):
        assert torch.equal(one, other)


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
def test_a_module_that_changed_since_it_was_grown_learns_as_it_is_now(
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


@pytest.mark.parametrize("training", [True, False])
def test_what_happens_in_training_alone_happens(training: bool) -> None:
    net = rankup.grow(BlindWhileLearning().train(training), Rank(2, 1))
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


def test_what_is_not_factored_starts_from_the_seed_alone() -> None:
    found = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        net = rankup.grow(Attentive(), Rank(2, 1), exclude=["attention"], seed=5)
        found.append(net.body.attention.in_proj_weight)
    assert torch.equal(*found)
    other = rankup.grow(Attentive(), Rank(2, 1), exclude=["attention"], seed=6)
    assert not torch.equal(found[0], other.body.attention.in_proj_weight)


def test_no_batch_that_norms_look_at_is_of_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_CHUNK", 64)
    normed = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    task = halves(65)
    assert right(rankup.fit(rankup.grow(normed, Rank(2, 1)), task, RECIPE), task) > 0.9


def test_a_norm_without_tensors_keeps_each_tasks_statistics() -> None:
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
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layer = nn.Linear(8, 16)
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(x).mean(1)).relu())


def test_indices_of_tokens_reach_the_module_as_they_are(tmp_path: Path) -> None:
    x = torch.randint(20, (200, 5), generator=torch.Generator().manual_seed(0))
    y = (x < 10).sum(1).gt(2).long()
    task = rankup.Task("tokens", 2, x, y, x, y)
    net = rankup.grow(Tokens(), Rank(4, 1), exclude="embedding")
    assert right(rankup.fit(net, task, Recipe(epochs=60, batch=32)), task) > 0.9
    # A Linear cannot take indices, and says so.
    with pytest.raises(rankup.RankupError, match=r"computes in torch.float32, got torch.int64"):
        rankup.fit(rankup.grow(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2)), Rank(2, 1)), task)


def test_what_a_layer_is_can_be_seen() -> None:
    shown = repr(rankup.grow(rankup.models.resnet18(width=4), Rank(2, 1)))
    assert "FactoredConv2d(in=27, out=4, bias=False, kernel=(3, 3), stride=(1, 1), factors=0)" in (
        shown
    )
    assert "TaskHead(in=32, bias=True)" in shown
    assert "TaskNorm(batch2d, 4, weight=True, bias=True)" in shown


@pytest.mark.parametrize("pairs", [False, True])
def test_norms_are_calibrated_on_whatever_the_module_takes(pairs: bool) -> None:
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


def test_a_layer_that_never_runs_is_in_nobodys_way() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.spare = nn.Linear(12, 16), nn.Linear(12, 5)
            self.head = nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.hidden(x).relu())

    task = halves()
    net = rankup.grow(Spare(), Rank(4, 1), head="head")
    for name in ("one", "two"):
        rankup.fit(net, replace(task, name=name), RECIPE)
    assert right(net, task, 1) > 0.8


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


def test_a_module_may_draw_its_layers_beside_its_own_parameters() -> None:
    one, other = (rankup.grow(Classy(), Rank(4, 1), exclude="token", head="head") for _ in range(2))
    assert float(one.body.token.norm()) > 1
    assert torch.equal(one.body.token, other.body.token)  # of the network's seed
    # One that cannot be drawn without arguments stays as it was given.
    given = rankup.grow(Classy(by_hand=True), Rank(4, 1), exclude="token", head="head")
    assert float(given.body.token.norm()) == 0


class Counted:
    """A coin that alternates between its sides."""

    def __init__(self) -> None:
        self.thrown = 0

    def __call__(self) -> bool:
        self.thrown += 1
        return self.thrown % 2 == 0


@pytest.mark.parametrize(
    "coin",
    [
        lambda: bool(torch.rand(()) < 0.5),
        lambda: random.random() < 0.5,
        lambda: np.random.rand() < 0.5,  # noqa: NPY002
        Counted(),
    ],
    ids=["torch", "python", "numpy", "counted"],
)
def test_a_module_that_goes_a_way_at_random_is_run_and_not_written_out(
    coin: Callable[[], bool],
) -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x).relu()
            if not self.training or coin():
                x = self.b(x).relu()
            return self.head(x)

    for seed in range(4):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        net = rankup.grow(Dropped(), Rank(4, 1), head="head")
    task = halves()
    assert right(rankup.fit(net, task, RECIPE), task) > 0.8


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


def test_a_module_that_says_nothing_and_keeps_its_features_is_merged() -> None:
    net, task = rankup.grow(Quiet(), Rank(4, 1)), halves()
    net.begin_task("by hand", classes=2)
    net(task.train_x, "by hand").sum().backward()
    net.commit_task()
    merged = net.merged("by hand")
    expected = net.eval()(task.test_x, "by hand")
    torch.testing.assert_close(merged(task.test_x), expected)
    assert not merged.training
    student = rankup.grow(Quiet(), Rank(4, 1))
    teacher = rankup.fit(rankup.grow(Quiet(), Rank(4, 1)), task, RECIPE).merged(task.name)
    rankup.fit(student, task, RECIPE, teacher=teacher)
    assert rankup.accuracy(student, task) > 0.8


def test_a_module_that_has_kept_its_features_can_be_grown_and_teach() -> None:
    task, module = halves(), Quiet()
    module(task.train_x).sum().backward()
    net = rankup.grow(module, Rank(4, 1))
    assert net.plan.first == "hidden"  # so it was traced
    teacher = rankup.fit(net, task, RECIPE).merged(task.name)
    teacher(task.train_x).sum().backward()
    student = rankup.fit(rankup.grow(module, Rank(4, 1)), task, RECIPE, teacher=teacher)
    assert rankup.accuracy(student, task) > 0.8


class Casting(nn.Module):
    """Looks at a weight's dtype, as many published models do, or at its values."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.reads = reads
        self.hidden, self.norm = nn.Linear(12, 16), nn.LayerNorm(16)
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.hidden(x.to(self.hidden.weight.dtype).view(-1, self.hidden.weight.size(1)))
        x = self.norm(x.to(self.norm.weight.device))
        assert self.head.weight.shape[1] == 16
        if self.reads:
            x = x + self.hidden.weight.sum()
        answer: Tensor = self.head(x.to(self.hidden.bias.dtype).relu())
        return answer


def test_the_kind_of_a_weight_can_be_seen_in_mixed_batches_and_its_numbers_cannot() -> None:
    task = halves()
    nets = [rankup.grow(Casting(reads), Rank(4, 1), head="head") for reads in (False, True)]
    for net in nets:
        for name in ("a", "b"):
            net.begin_task(name, classes=2)
            net.commit_task()
        net.eval()
    x, tasks = task.test_x, torch.arange(len(task.test_x)) % 2
    alone = torch.stack([nets[0](x, name) for name in ("a", "b")])
    torch.testing.assert_close(nets[0](x, tasks), alone[tasks, torch.arange(len(x))])
    with pytest.raises(rankup.RankupError, match="layer 'hidden' has a weight for each task"):
        nets[1](x, tasks)


class Doubling(nn.Module):
    """Gives its head more digits than that computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(12, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x).relu().double())


def test_a_head_says_in_what_it_computes() -> None:
    net = rankup.grow(Doubling(), Rank(4, 1))
    net.begin_task("a", 2)
    with pytest.raises(rankup.RankupError, match="'head' computes in torch.float32, got torch.flo"):
        net(torch.zeros(3, 12), task="a")

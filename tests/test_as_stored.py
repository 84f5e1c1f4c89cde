"""What a network answers with is what its files hold, norms' statistics included."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rankup
from rankup.packing import Store, pack


def far_from_zero(samples: int, mean: float = 30.0) -> rankup.Task:
    """Inputs whose mean is many deviations from zero, as of tables that nobody has scaled."""

    def drawn() -> tuple[Tensor, Tensor]:
        z = torch.randn(samples, 8)
        return z + mean, (z[:, 0] * z[:, 1] > 0).long() + 2 * (z[:, 2] + z[:, 3] > 0).long()

    return rankup.Task("far", 4, *drawn(), *drawn())


def with_norms() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU()),
        *(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)),
    )


def test_statistics_are_those_of_rounded_weights() -> None:
    task, recipe = far_from_zero(2000), rankup.Recipe(epochs=10)
    net = rankup.grow(with_norms(), rankup.Rank(8, 1), store="int8")
    rankup.fit(net, task, recipe)
    norm, seen = net.body.get_submodule("1"), list[Tensor]()
    hook = norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        net.eval()(task.train_x, task="far")
    hook.remove()
    (x,) = seen
    off = (norm.means[0] - x.mean(0)).abs() / x.std(0)  # type: ignore[index]
    assert float(off.max()) < 0.011  # of which the norm's own rounding takes 0.01 at most
    full = rankup.fit(rankup.grow(with_norms(), rankup.Rank(8, 1)), task, recipe)
    assert rankup.accuracy(net, task) > rankup.accuracy(full, task) - 0.02


@pytest.mark.parametrize("store", ["float16", "int8"])
def test_a_mean_that_half_precision_would_move_stays_as_it_is(store: Store) -> None:
    x = torch.randn(200, 3) * torch.tensor([20.0, 20, 1]) + torch.tensor([33333.0, 51111, 0.5])
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    net = rankup.grow(module, rankup.Rank(2, 1), store=store)
    net.begin_task("far", 2)
    net.commit_task(calibrate=[x])
    norm = net.body.get_submodule("0")
    off = (norm.means[0] - x.mean(0)).abs() / x.std(0)  # type: ignore[index]
    assert float(off.max()) < 1e-3
    assert net.size().bytes == sum(t.nbytes for t in packed_tensors(net))


def packed_tensors(net: rankup.IncrementalNet) -> Iterator[Tensor]:
    for part in net.parts:
        yield from pack(part.spec, part.added(0), net.growth.store).values()


@pytest.mark.parametrize("store", ["float16", "int8"])
def test_a_far_mean_comes_back_bit_for_bit(store: Store, tmp_path: Path) -> None:
    torch.manual_seed(1)
    x = torch.randn(100, 4) + 5000.3
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    net = rankup.grow(module, rankup.Rank(2, 1), store=store)
    net.begin_task("far", 2)
    net.commit_task(calibrate=[x])
    rankup.save(net, tmp_path)
    again = rankup.load(tmp_path, module)
    assert torch.equal(again(x, task=0), net.eval()(x, task=0))


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError])
def test_a_commit_that_fails_leaves_what_was_learned(stop: type[BaseException]) -> None:
    net = rankup.grow(with_norms(), rankup.Rank(4, 1), store="int8")
    net.begin_task("a", 4)
    learned = {name: p.detach().clone() for name, p in net.named_parameters()}

    def broken() -> Iterator[Tensor]:
        yield torch.randn(16, 8)
        raise stop

    with pytest.raises(stop):
        net.commit_task(calibrate=broken())
    assert all(torch.equal(p, learned[name]) for name, p in net.named_parameters())
    with torch.no_grad():
        next(net.parameters()).fill_(float("nan"))
    with pytest.raises(rankup.RankupError, match="not finite"):
        net.commit_task(calibrate=[torch.randn(16, 8)])


def rare(samples: int, knows: bool) -> rankup.Task:
    """Two of a hundred samples are of the second class, and there is something that tells them."""

    def drawn() -> tuple[Tensor, Tensor]:
        x = torch.randn(samples, 20)
        likely = torch.sigmoid(2.2 * x[:, 0] + 1.5 * x[:, 1] - 6.5)
        return (x if knows else torch.randn(samples, 20)), (torch.rand(samples) < likely).long()

    return rankup.Task("rare", 2, *drawn(), *drawn())


def small() -> rankup.IncrementalNet:
    return rankup.grow(rankup.models.mlp(20, hidden=[32, 32]), rankup.Rank(8, 1))


def test_a_task_of_rare_classes_is_learned() -> None:
    task = rare(10_000, knows=True)
    net = rankup.fit(small(), task, rankup.Recipe(epochs=4))
    score = net(task.test_x, task=0)[:, 1] - net(task.test_x, task=0)[:, 0]
    rank_of = score.argsort().argsort().double()
    rare_ones = task.test_y == 1
    worse = rank_of[rare_ones].mean() - (int(rare_ones.sum()) - 1) / 2
    assert worse / int((~rare_ones).sum()) > 0.85  # the area under the curve


def test_a_task_of_rare_classes_that_nothing_tells_is_refused() -> None:
    recipe = rankup.Recipe(epochs=1, lr=1e-4)
    with pytest.raises(rankup.TaskFailed, match="not three standard errors above guessing"):
        rankup.fit(small(), rare(10_000, knows=False), recipe)


def test_inputs_of_float64_keep_their_digits() -> None:
    z = torch.randn(1000, 4, dtype=torch.float64)
    x, y = z + 1.7e9, (z[:, 0] > 0).long()
    task = rankup.Task("far", 2, x, y, x, y)
    layers = nn.BatchNorm1d(4), nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)
    net = rankup.grow(nn.Sequential(*layers).double(), rankup.Rank(4, 1))
    rankup.fit(net, task, rankup.Recipe(epochs=10))
    assert rankup.accuracy(net, task) > 0.95


class Backbone(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU())
        self.mid, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(self.mid(self.backbone(x).mean((2, 3))).relu())
        return answer


@pytest.mark.parametrize("affine", [True, False])
def test_a_frozen_backbone_keeps_its_statistics(affine: bool, tmp_path: Path) -> None:
    module = Backbone(lambda channels: nn.BatchNorm2d(channels, affine=affine))
    for _ in range(20):
        module(5 + 2 * torch.randn(32, 3, 8, 8))
    module.backbone.requires_grad_(False)
    x = 5 + 2 * torch.randn(4, 3, 8, 8)
    given = module.eval().backbone(x)
    net = rankup.grow(module, rankup.Rank(2, 1), exclude=["backbone"])
    for mode in (net.train, net.eval):
        mode()
        net.begin_task(f"task {mode.__name__}", 3)
        net(x, task=len(net.tasks)).sum().backward()
        net.commit_task()
        assert torch.equal(net.body.get_submodule("backbone")(x), given)
    rankup.save(net, tmp_path)
    other = Backbone(lambda channels: nn.BatchNorm2d(channels, affine=affine))
    other.backbone.requires_grad_(False)
    again = rankup.load(tmp_path, other)
    assert torch.equal(again.body.get_submodule("backbone")(x), given)


def test_what_came_with_the_module_is_not_lost_before_the_first_task(
    tmp_path: Path,
) -> None:
    layers = nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
    module = nn.Sequential(*layers)
    module[0].requires_grad_(False)
    net = rankup.grow(module, rankup.Rank(2, 1), exclude=["0"])
    with pytest.raises(rankup.RankupError, match=r"'0\.weight' came with the module"):
        rankup.save(net, tmp_path)
    net.begin_task("a", 3)
    net.commit_task()
    rankup.save(net, tmp_path)
    other = nn.Sequential(nn.Linear(16, 8), *layers[1:])
    other[0].requires_grad_(False)
    weight = rankup.load(tmp_path, other).body.get_submodule("0").weight
    assert torch.equal(weight, module[0].weight)  # type: ignore[arg-type]


class Restless(nn.Module):
    """Whose buffer changes whenever it runs, in training or not."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        z = self.hidden(x)
        self.mean.mul_(0.9).add_(0.1 * z.detach().mean(0))  # type: ignore[operator]
        answer: Tensor = self.head((z - self.mean).relu())
        return answer


def test_a_module_that_changes_whenever_it_answers_is_refused() -> None:
    net = rankup.grow(Restless(), rankup.Rank(2, 1))
    with pytest.raises(rankup.RankupError, match="changes its buffer 'mean' also when it only"):
        rankup.fit(net, far_from_zero(100), rankup.Recipe(epochs=1))
    assert net.learning is None
    assert torch.equal(net.body.get_buffer("mean"), torch.zeros(8))


@pytest.mark.parametrize("head", [None, "head"])
def test_a_module_that_cannot_be_copied_says_why(head: str | None) -> None:
    module = Restless()
    module.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(rankup.RankupError, match="a copy of the module, which cannot be made: can"):
        rankup.grow(module, rankup.Rank(2, 1), head=head)


def test_what_was_merged_in_inference_mode_can_be_trained() -> None:
    net = small()
    net.begin_task("a", 3)
    net.commit_task()
    with torch.inference_mode():
        merged = net.merged("a")
    merged(torch.randn(4, 20)).sum().backward()
    assert all(p.grad is not None for p in merged.parameters())

"""A network answers with exactly what its files hold, including norms' statistics."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rankup
from rankup.layers.rounding import Store, pack


def far_from_zero(samples: int, mean: float = 30.0) -> rankup.Task:
    """Inputs whose mean is many deviations from zero, as in unscaled tables."""

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
    assert float(off.max()) < 0.011  # the norm's own rounding takes at most 0.01 of this
    full = rankup.fit(rankup.grow(with_norms(), rankup.Rank(8, 1)), task, recipe)
    assert rankup.accuracy(net, task) > rankup.accuracy(full, task) - 0.02


@pytest.mark.parametrize("store", ["float16", "int8"])
def test_mean_that_half_precision_would_move_stays_as_it_is(store: Store) -> None:
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
        yield from pack(part.spec, part.added(0), net.options.store).values()


@pytest.mark.parametrize("store", ["float16", "int8"])
def test_far_mean_comes_back_bit_for_bit(store: Store, tmp_path: Path) -> None:
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
def test_commit_that_fails_leaves_what_was_learned(stop: type[BaseException]) -> None:
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

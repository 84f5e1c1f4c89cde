"""Norms per task compute what torch's do, with statistics pooled over the task's data."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import rankup
from helpers.zoo import relative_error
from rankup.layers import (
    TaskNorm,
    active,
)
from rankup.rank import Rank

F64 = torch.float64

NORMS = {
    "batch1d": (lambda: nn.BatchNorm1d(4, dtype=F64), (7, 4)),
    "batch1d over sequences": (lambda: nn.BatchNorm1d(4, affine=False, dtype=F64), (7, 4, 5)),
    "batch2d": (lambda: nn.BatchNorm2d(4, eps=1e-3, dtype=F64), (7, 4, 3, 3)),
    "batch3d": (lambda: nn.BatchNorm3d(4, dtype=F64), (7, 4, 2, 3, 2)),
    "layer": (lambda: nn.LayerNorm(4, dtype=F64), (7, 5, 4)),
    "layer without bias": (lambda: nn.LayerNorm((3, 4), bias=False, dtype=F64), (7, 2, 3, 4)),
    "rms": (lambda: nn.RMSNorm((3, 4), dtype=F64), (7, 2, 3, 4)),
    "rms of a given epsilon": (lambda: nn.RMSNorm(4, eps=0.1, dtype=F64), (7, 4)),
    "group": (lambda: nn.GroupNorm(2, 4, dtype=F64), (7, 4, 3)),
}


def norm_network(kind: str) -> tuple[rankup.IncrementalNet, TaskNorm, Tensor]:
    make, shape = NORMS[kind]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=F64)
    # A minimal network around the norm, which is what is tested.
    module = nn.Sequential(make(), nn.Flatten(), nn.LazyLinear(6), nn.ReLU(), nn.Linear(6, 2))
    module.to(F64)(x)
    net = rankup.grow(module, Rank(2, 1))
    return net, net.body[0], x


@pytest.mark.parametrize("kind", NORMS)
def test_norm_per_task_computes_what_torchs_does(kind: str) -> None:
    net, norm, x = norm_network(kind)
    for task in range(3):
        net.begin_task(f"{task}", 2)
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter.copy_(torch.randn(parameter.shape))
        reference = NORMS[kind][0]()
        for key, parameter in norm.named_parameters():
            setattr(reference, key.removeprefix("new_"), nn.Parameter(parameter.clone()))
        with active(task):  # while it is learned: statistics of the batch, in either mode
            learning = norm.eval()(x + task)
        torch.testing.assert_close(learning, reference.train()(x + task))
        net.commit_task([x[:3] + task, x[3:] + task])
    for task in range(3):
        with active(task):
            evaluated, trained = norm.eval()(x), norm.train()(x)
        assert torch.equal(evaluated, trained)
        torch.testing.assert_close(evaluated, norm.merged(task)(x))
    ids = torch.tensor([2, 0, 1, 1, 0, 2, 0])
    with active(ids):
        mixed = norm(x)
    loop = torch.stack([norm.merged(t)(x)[i] for i, t in enumerate(ids.tolist())])
    assert relative_error(mixed, loop) < 1e-12


def test_calibration_pools_over_all_samples_of_unequal_batches() -> None:
    net, norm, x = norm_network("batch2d")
    net.begin_task("a", 2)
    far = 1e4 + torch.cat([x, 3 * x[:5] - 2])  # a large mean exposes cancellation
    net.commit_task([far[:1], far[1:6], far[6:]])
    torch.testing.assert_close(norm.means[0], far.mean((0, 2, 3)))
    torch.testing.assert_close(norm.vars[0], far.var((0, 2, 3), correction=0), rtol=1e-9, atol=0)


@pytest.mark.parametrize("start", ["fresh", "previous"])
def test_where_norms_start(start: str) -> None:
    net, norm, x = norm_network("batch2d")
    net.begin_task("a", 2)
    with torch.no_grad():
        norm.new_weight.fill_(3)
        norm.new_bias.fill_(4)
    net.commit_task([x])
    net.begin_task("b", 2, norms=start)
    expected = (3, 4) if start == "previous" else (1, 0)
    assert (norm.new_weight.tolist(), norm.new_bias.tolist()) == tuple([v] * 4 for v in expected)


def test_norm_reads_all_its_tables_at_one_moment() -> None:
    net, norm, x = norm_network("batch1d")
    net.begin_task("a", 2)
    net.commit_task([x])
    ids = torch.zeros(len(x), dtype=torch.long)
    with active(ids):
        expected = norm(x)
    again = norm.added(0)

    class Interrupted(dict):
        def items(self) -> Iterator:
            for item in super().items():
                norm.install(norm.extended(again))  # as another thread may
                yield item

    norm._TABLES = Interrupted(norm._TABLES)
    with active(ids):
        assert torch.equal(norm(x), expected)

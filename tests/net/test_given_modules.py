"""What a module has besides its layers: modes, buffers, frozen parameters."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankup
from helpers.own_modules import RECIPE, halves
from rankup.rank import Rank


class Scaled(nn.Module):
    """Inputs on a scale that is given and not learned."""

    table: Tensor

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((12,), 0.5), requires_grad=False)
        self.register_buffer("table", torch.arange(12).to(dtype) / 3)
        self.hidden, self.head = nn.Linear(12, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x * self.scale + self.table.to(x.dtype)).relu())


def grown(module: nn.Module, **options: object) -> rankup.IncrementalNet:
    return rankup.grow(module, Rank(4, 1), exclude="scale", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("base", ["new", "keep"])
@pytest.mark.parametrize("store", ["full", "int8"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_buffers_of_another_dtype_come_back_to_bit(
    dtype: torch.dtype, store: str, base: str, tmp_path: Path
) -> None:
    net = grown(Scaled(dtype), base=base, store=store)
    net.begin_task("a", 3)
    net.commit_task()
    rankup.save(net, tmp_path / "net")
    assert not rankup.verify(tmp_path / "net").problems
    loaded = rankup.load(tmp_path / "net", Scaled(dtype))
    assert loaded.body.table.dtype == dtype
    assert torch.equal(loaded.body.table, Scaled(dtype).table)
    x = torch.rand(3, 12)
    assert torch.equal(loaded(x, task="a"), net.eval()(x, task="a"))


@pytest.mark.parametrize("base", ["new", "keep"])
def test_frozen_parameter_is_not_learned(base: str) -> None:
    torch.manual_seed(1)
    net = grown(Scaled(), base=base, seed=1)
    net.begin_task("a", 2)
    assert "body.scale" not in dict(net.named_parameters())
    net.abandon_task()
    rankup.fit(net, halves(), RECIPE)
    assert net.body.scale.tolist() == [0.5] * 12
    merged = net.merged(0)
    assert "scale" not in dict(merged.named_parameters())
    assert merged.state_dict().keys() == Scaled().state_dict().keys()


def test_grow_keeps_the_mode_of_every_module() -> None:
    module = nn.Sequential(nn.Linear(12, 16), nn.Dropout(), nn.LayerNorm(16), nn.Linear(16, 2))
    module[1].eval()
    module[2].eval()
    net, task = rankup.grow(module, Rank(4, 1)), halves()

    def modes() -> list[bool]:
        return [net.training, *(part.training for part in net.body)]

    given = [True, True, False, False, True]
    assert modes() == given
    rankup.fit(net, task, RECIPE)
    assert modes() == given
    rankup.accuracy(net, task)
    assert modes() == given
    net.eval()
    rankup.accuracy(net, task)
    assert not any(modes())


def test_shared_norm_stays_constant_after_first_task() -> None:
    module = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    net = rankup.grow(module, Rank(4, 1), exclude="1")
    rankup.fit(net, halves(), RECIPE)
    assert net.training
    assert not net.body[1].training


@pytest.mark.parametrize("affine", [True, False])
def test_new_base_resets_statistics(affine: bool) -> None:
    norm = nn.BatchNorm1d(8, affine=affine)
    module = nn.Sequential(nn.Linear(12, 8), norm, nn.Linear(8, 8), nn.Linear(8, 2))
    module(torch.randn(64, 12) + 100)
    assert norm.running_mean is not None
    assert norm.running_mean.abs().max() > 1
    for base, expected in (("new", torch.zeros(8)), ("keep", norm.running_mean)):
        net = rankup.grow(module, Rank(2, 1), exclude="1", base=base)  # type: ignore[arg-type]
        assert torch.equal(net.body[1].running_mean, expected)


def test_next_task_is_where_others_are() -> None:
    net = rankup.grow(rankup.models.mlp(6, hidden=[8]), Rank(2, 1)).to("meta")
    for change in ({"dtype": torch.float32}, {"memory_format": torch.channels_last}):
        net.to(**change)
        net.begin_task("a", 3)
        assert {p.device.type for p in net.parameters()} == {"meta"}
        net.abandon_task()


class Looking(nn.Module):
    """Reads attributes of its layers that torch's own have, as a forward may."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, stride=2, padding=1, dilation=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.GroupNorm(2, 4)])
        self.last, self.head = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        conv, (batch, group) = self.conv, self.norms
        assert (conv.kernel_size, conv.stride) == ((3, 3), (2, 2))
        assert (conv.padding, conv.dilation, conv.groups) == ((1, 1), (1, 1), 1)
        assert (batch.num_features, group.num_groups, group.num_channels) == (4, 2, 4)
        assert self.last.normalized_shape == (4,)
        assert batch.eps == group.eps == self.last.eps == 1e-5
        x = group(batch(conv(x))).mean((2, 3))
        return self.head(F.relu(self.last(x)))


def test_forward_may_read_attributes_of_layers() -> None:
    net = rankup.grow(Looking(), Rank(2, 1), head="head")
    net.begin_task("a", 2)
    assert net(torch.rand(3, 1, 6, 6), task="a").shape == (3, 2)


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x.to(next(self.parameters()).device)).relu())


@pytest.mark.parametrize("task", [0, [0, 0]])
def test_forward_that_reads_first_parameter_is_refused(task: int) -> None:
    net = rankup.grow(Asking(), Rank(2, 1))
    net.begin_task("a", 3)
    net(torch.zeros(2, 4), task="a")
    net.commit_task()
    with pytest.raises(rankup.RankupError, match="between tasks a grown network has none"):
        net(torch.zeros(2, 4), task=task)
    assert net.merged("a")(torch.zeros(2, 4)).shape == (2, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.long])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.LayerNorm(4), nn.RMSNorm(4)])
def test_first_norm_refuses_other_dtype(norm: nn.Module, dtype: torch.dtype) -> None:
    net = rankup.grow(nn.Sequential(norm, nn.Linear(4, 4), nn.Linear(4, 3)), Rank(2, 1))
    net.begin_task("a", 3)
    says = f"layer '0' computes in torch.float32, got {dtype}"
    with pytest.raises(rankup.RankupError, match=says):
        net(torch.ones(3, 4, dtype=dtype), task="a")

"""Modules that change their own buffers: nothing that was learned is forgotten through them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankup
from helpers.own_modules import RECIPE, halves
from rankup.layers.rounding import Store
from rankup.rank import Rank
from rankup.storage.manifest import MANIFEST, Manifest


class Averaging(nn.Module):
    """Centres its inputs by a running mean, as commonly written.

    Args:
        assigned: assign a new tensor each time instead of changing the old one.
    """

    mean: Tensor

    def __init__(self, assigned: bool = False, persistent: bool = True) -> None:
        super().__init__()
        self.assigned = assigned
        self.register_buffer("mean", torch.zeros(12), persistent)
        self.hidden, self.head = nn.Linear(12, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            if self.assigned:
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            else:
                self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.head(self.hidden(x - self.mean).relu())


def grown(module: nn.Module, store: Store = "full") -> rankup.IncrementalNet:
    return rankup.grow(module, Rank(4, 1), head="head", store=store)


def moved(task: rankup.Task) -> rankup.Task:
    return replace(task, name="moved", train_x=task.train_x + 1, test_x=task.test_x + 1)


@pytest.mark.parametrize("assigned", [False, True])
def test_averages_are_constant_after_first_task(assigned: bool, tmp_path: Path) -> None:
    task = halves()
    net = grown(Averaging(assigned=assigned))
    rankup.fit(net, task, RECIPE)
    mean, answer = net.body.mean.clone(), net.eval()(task.test_x, 0)
    torch.testing.assert_close(mean, task.train_x.mean(0), atol=0.05, rtol=0)
    rankup.fit(net, moved(task), RECIPE)
    assert torch.equal(net.body.mean, mean)
    assert torch.equal(net.eval()(task.test_x, 0), answer)
    rankup.save(net, tmp_path)
    back = rankup.load(tmp_path, module=Averaging(assigned=assigned)).eval()
    x = moved(task).test_x
    assert torch.equal(back(x, 1), net(x, 1))


def test_grow_leaves_given_buffers_alone() -> None:
    module = Averaging()
    module.mean.fill_(3.0)
    net = grown(module.train())
    assert torch.equal(module.mean, torch.full((12,), 3.0))
    assert torch.equal(net.body.mean, module.mean)


def test_loaded_network_learns_same(tmp_path: Path) -> None:
    task = halves()
    net = rankup.fit(grown(Averaging()), task, RECIPE)
    rankup.save(net, tmp_path)
    back = rankup.load(tmp_path, module=Averaging())
    for each in (net, back):
        rankup.fit(each, moved(task), RECIPE)
    x = moved(task).test_x
    assert torch.equal(back.eval()(x, 1), net.eval()(x, 1))


def step(net: rankup.IncrementalNet, task: rankup.Task) -> None:
    """Take a step by hand, without inspecting the module first."""
    net.train()
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(3):
        optimiser.zero_grad()
        F.cross_entropy(net(task.train_x, task.name), task.train_y).backward()
        optimiser.step()


@pytest.mark.parametrize("store", ["full", "int8"])
@pytest.mark.parametrize("norm", [False, True])
def test_self_updating_buffer_is_refused_once_then_held(norm: bool, store: Store) -> None:
    class Normed(Averaging):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(12) if norm else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x))

    task = halves()
    net = rankup.fit(grown(Normed(), store=store), task, RECIPE)
    answer = net.eval()(task.test_x, 0)
    net._shared.self_updating.clear()  # as if it had not changed in the first task
    batches = [task.train_x]
    net.begin_task("moved", 2)
    step(net, moved(task))
    with pytest.raises(rankup.TaskStateError, match="it is held constant from now on"):
        net.commit_task(calibrate=batches)
    assert torch.equal(net.eval()(task.test_x, 0), answer)
    net.abandon_task()
    net.begin_task("moved", 2)
    step(net, moved(task))
    net.commit_task(calibrate=batches)
    assert torch.equal(net.eval()(task.test_x, 0), answer)


def test_cache_outside_state_may_grow() -> None:
    class Caching(Averaging):
        def __init__(self) -> None:
            super().__init__(persistent=False)
            self.register_buffer("places", torch.zeros(0), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            if len(self.places) < x.shape[1]:
                self.places = torch.arange(x.shape[1], dtype=x.dtype)
            return self.head(self.hidden(x + 0 * self.places).relu())

    task = halves()
    net = rankup.fit(grown(Caching()), task, RECIPE)
    assert len(net.body.places) == 12
    assert rankup.accuracy(net, task) > 0.8


def test_constant_buffer_may_be_infinite() -> None:
    class Masked(Averaging):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.tensor([-torch.inf, torch.nan, 0.0]))

    task = halves()
    net = rankup.fit(grown(Masked()), task, RECIPE)
    assert net.tasks == ["halves"]
    assert float(net.body.mask[0]) == -torch.inf


def test_buffer_that_becomes_nan_is_refused() -> None:
    class Spoiled(Averaging):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.training:
                self.mean.fill_(torch.nan)
            return y

    task = halves()
    net = grown(Spoiled())
    net.begin_task("halves", 2)
    net.train()(task.train_x, "halves")
    with pytest.raises(rankup.TaskStateError, match="mean holds values that are not finite"):
        net.commit_task()


class Moving(nn.Module):
    """Moves a parameter of its own while it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(16))
        self.hidden, self.head = nn.Linear(12, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.hidden(x)
        if self.training:
            with torch.no_grad():
                self.centre.lerp_(z.mean(0), 0.1)
        return self.head((z - self.centre).relu())


@pytest.mark.parametrize("base", ["new", "keep"])
def test_self_moved_parameter_is_constant_after_first_task(base: str) -> None:
    task = halves()
    net = rankup.grow(Moving(), Rank(4, 1), exclude="centre", head="head", base=base)  # type: ignore[arg-type]
    rankup.fit(net, task, RECIPE)
    before = net.eval()(task.test_x, task.name)
    if base == "new":  # steps move it too, so that it is not known yet
        net.train()
        net.begin_task("next", classes=2)
        net(task.train_x, "next").sum().backward()
        with pytest.raises(rankup.TaskStateError, match="changed its 'centre' while it"):
            net.commit_task()
        net.abandon_task()
    rankup.fit(net, moved(task), RECIPE)
    assert torch.equal(net.eval()(task.test_x, task.name), before)


class Collecting(nn.Module):
    """Keeps what it has seen in a buffer that grows."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, 16))
        self.hidden, self.head = nn.Linear(12, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.hidden(x)
        if self.training:
            self.seen = torch.cat([self.seen, z.detach()])[-50:]
        return self.head((z - self.seen.mean(0)).relu())


def test_grown_buffer_is_refused_at_commit() -> None:
    net, task = grown(Collecting()), halves()
    net.begin_task("halves", 2)
    net.train()(task.train_x, "halves").sum().backward()
    with pytest.raises(rankup.TaskStateError, match=r"seen is \[50, 16\], not \[1, 16\]"):
        net.commit_task()
    net.abandon_task()
    assert net.body.seen.shape == (1, 16)


class DynamicRope(nn.Module):
    """Rotary frequencies as transformers' dynamic RoPE keeps them: rescaled for longer inputs in a
    buffer outside of the state."""

    inv_freq: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.most = self.original = 4
        self.register_buffer("inv_freq", self.frequencies(1.0), persistent=False)
        self.into, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def frequencies(self, scale: float) -> Tensor:
        return 1 / (10.0 * scale) ** (torch.arange(4) / 4)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, 8]
        length = x.shape[1]
        if length > self.most:
            self.register_buffer("inv_freq", self.frequencies(length / 4), persistent=False)
            self.most = length
        angles = torch.arange(length)[:, None] * self.inv_freq
        x = self.into(x) * torch.cat([angles.cos(), angles.sin()], 1)
        return self.head(x.relu().mean(1))


@pytest.mark.parametrize("base", ["new", "keep"])
def test_dynamic_rope_learns_and_loads(base: str, tmp_path: Path) -> None:
    net = rankup.grow(DynamicRope(), Rank(2, 1), base=base, head="head")  # type: ignore[arg-type]
    short, long = torch.randn(6, 4, 8), torch.randn(6, 7, 8)
    for name, x in (("short", short), ("long", long)):
        net.begin_task(name, 2)
        optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
        net.train()(x, name).square().sum().backward()
        optimiser.step()
        net.commit_task()
    answer = net.eval()(long, "long")
    rankup.save(net, tmp_path)
    loaded = rankup.load(tmp_path, module=DynamicRope())
    assert torch.equal(loaded(long, "long"), answer)


def test_own_loop_continues_loaded_network(tmp_path: Path) -> None:
    task = halves()
    net = rankup.fit(grown(Averaging()), task, RECIPE)
    rankup.save(net, tmp_path)
    back = rankup.load(tmp_path, module=Averaging())
    answer = back(task.test_x, 0)
    back.begin_task("moved", 2)
    step(back, moved(task))
    back.commit_task()
    assert torch.equal(back.eval()(task.test_x, 0), answer)
    rankup.save(back, tmp_path)
    assert rankup.verify(tmp_path)


def test_manifest_with_unknown_buffer_is_refused(tmp_path: Path) -> None:
    rankup.save(rankup.fit(grown(Averaging()), halves(), RECIPE), tmp_path)
    manifest = Manifest.read(tmp_path)
    assert manifest.updating == ("mean",)
    (tmp_path / MANIFEST).write_bytes(replace(manifest, updating=("other",)).to_bytes())
    assert "no tensor 'other' that its module could change" in str(rankup.verify(tmp_path))

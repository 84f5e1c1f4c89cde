"""The `on_epoch` callback of `fit`."""

import math

import pytest
import torch
from torch import nn

import rankup
from helpers.bars import FakeBar
from helpers.clusters import QUICK, clusters, net
from helpers.zoo import assert_same_bits, logits
from rankup.rank import Rank
from rankup.training.checkpoint import Checkpoint
from rankup.training.loop import Epoch
from rankup.utils import progress


def test_network_answers_in_on_epoch() -> None:
    task, network, pairs = clusters(), net(), list[tuple[float, float]]()

    def look(epoch: Epoch, checkpoint: Checkpoint) -> None:
        correct = network(task.train_x, task.name).argmax(1) == task.train_y
        pairs.append((float(correct.float().mean()), epoch.accuracy()))

    rankup.fit(network, task, QUICK, on_epoch=look)
    assert all(accuracy == pytest.approx(reported) for accuracy, reported in pairs)
    assert pairs[-1][0] > 0.9


@pytest.mark.parametrize("end", ["commit_task", "abandon_task"])
def test_on_epoch_must_not_end_the_task(end: str) -> None:
    network = net()
    with pytest.raises(rankup.TaskStateError, match="on_epoch committed or abandoned"):
        rankup.fit(network, clusters(), QUICK, on_epoch=lambda *_: getattr(network, end)())
    assert network.learning is None


def test_modes_set_in_on_epoch_are_restored() -> None:
    def learned(look: bool) -> rankup.IncrementalNet:
        module = nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.5), nn.Linear(16, 3))
        network = rankup.grow(module, Rank(2, 1))
        callback = (lambda *_: network.eval()) if look else None
        return rankup.fit(network, clusters(), QUICK, on_epoch=callback)

    x = clusters().test_x
    assert_same_bits(logits(learned(True).eval(), x), logits(learned(False).eval(), x))


def test_epoch_has_no_accuracy_after_its_task() -> None:
    kept: list[Epoch] = []
    network = rankup.fit(net(), clusters(), QUICK, on_epoch=lambda epoch, _: kept.append(epoch))
    network.begin_task("next", 2)
    before = [parameter.clone() for parameter in network.parameters()]
    with pytest.raises(rankup.TaskStateError, match="while the task is being learned"):
        kept[-1].accuracy()
    assert all(map(torch.equal, before, network.parameters()))


def test_on_epoch_gets_number_loss_and_accuracy() -> None:
    seen: list[Epoch] = []
    right: list[float] = []

    def look(epoch: Epoch, _: Checkpoint) -> None:
        seen.append(epoch)
        right.append(epoch.accuracy())

    rankup.fit(net(), clusters(), QUICK, on_epoch=look)
    assert [(epoch.number, epoch.epochs) for epoch in seen] == [(n, 15) for n in range(1, 16)]
    assert seen[-1].loss < seen[0].loss
    assert right[-1] > 0.9
    assert all(math.isfinite(epoch.loss) for epoch in seen)


def test_interrupt_abandons_the_task() -> None:
    network = rankup.fit(net(), clusters("good"), QUICK)

    def interrupt(epoch: Epoch, checkpoint: Checkpoint) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rankup.fit(network, clusters("stopped"), QUICK, on_epoch=interrupt)
    assert network.learning is None
    assert network.tasks == ["good"]


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[FakeBar]:
    """Those that a terminal would show of what takes any time at all."""
    monkeypatch.setattr(progress, "_DELAY", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("rich.progress.Progress", FakeBar)
    monkeypatch.setattr(FakeBar, "made", [])
    return FakeBar.made


def test_terminal_shows_a_bar(bars: list[FakeBar]) -> None:
    task = clusters()
    network = rankup.fit(net(), task, QUICK)
    (bar,) = bars
    assert (bar.title, bar.total, bar.stopped) == (f"learning {task.name}", QUICK.epochs, True)
    assert bar.completed == [*range(1, QUICK.epochs + 1)]
    silent = rankup.fit(net(), task, QUICK, progress=False)
    assert_same_bits(logits(network, task.test_x), logits(silent, task.test_x))


def test_one_bar_for_tasks_learned_at_once(bars: list[FakeBar]) -> None:
    tasks = [clusters(name=name) for name in "ab"]
    network = net(base="keep")
    rankup.fit_together(network, tasks, QUICK)
    (bar,) = bars
    assert (bar.title, bar.total) == ("learning 2 tasks", 2 * QUICK.epochs)
    assert bar.completed[-1] == bar.total


@pytest.mark.parametrize("reason", ["not wanted", "on_epoch", "no terminal"])
def test_no_bar(reason: str, bars: list[FakeBar], monkeypatch: pytest.MonkeyPatch) -> None:
    if reason == "no terminal":
        monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    on_epoch = (lambda *_: None) if reason == "on_epoch" else None
    rankup.fit(net(), clusters(), QUICK, on_epoch=on_epoch, progress=reason != "not wanted")
    assert bars == []

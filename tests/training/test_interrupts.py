"""Interrupts and lack of memory leave a network as it was, or with a whole task."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import rankup
from helpers.clusters import clusters
from rankup.data.tasks import Task
from rankup.growing.options import GrowOptions
from rankup.layers import Start, TaskHead, TaskLayer, Tensors
from rankup.methods import method_class, method_options
from rankup.methods.base import Setting
from rankup.methods.shared.dense import DenseMethod
from rankup.rank import Rank
from rankup.training.recipe import Recipe
from rankup.utils.signals import undisturbed

QUICK = Recipe(epochs=5, batch=32)


@pytest.fixture
def handlers() -> Iterator[None]:
    """Signal handlers as the command line has them; a background process may have others."""
    before = {which: signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM)}
    for which in before:
        signal.signal(which, signal.default_int_handler)
    yield
    for which, handler in before.items():
        signal.signal(which, handler)


def interrupt_install(kind: type[TaskLayer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Send Ctrl-C where layers of a kind install what a task has learned."""
    install = kind.install

    def interrupted(layer: TaskLayer, *args: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        install(layer, *args)

    monkeypatch.setattr(kind, "install", interrupted)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_waits_for_the_end_of_the_block(which: int) -> None:
    done: list[int] = []

    def work() -> None:
        with undisturbed():
            os.kill(os.getpid(), which)
            done.append(which)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [which]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler


@pytest.mark.usefixtures("handlers")
def test_interrupt_while_restoring_restores_all_handlers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put, calls = signal.signal, list[int]()

    def interrupted(number: int, handler: object) -> object:
        answer = put(number, handler)  # type: ignore[arg-type]
        calls.append(number)
        if len(calls) == 3:  # the first that is put back
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr(signal, "signal", interrupted)
    with pytest.raises(KeyboardInterrupt), undisturbed():
        pass
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler


@pytest.mark.usefixtures("handlers")
def test_interrupted_commit_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    net = rankup.grow(rankup.models.mlp(12, hidden=[16]), Rank(2, 1))
    net.begin_task("a", 2)
    interrupt_install(TaskLayer, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        net.commit_task()
    assert net.tasks == ["a"]
    assert {part.count for part in net.parts} == {1}
    assert net.learning is None


def test_failed_begin_leaves_no_open_task(monkeypatch: pytest.MonkeyPatch) -> None:
    net = rankup.grow(rankup.models.mlp(12, hidden=[16]), Rank(2, 1))

    def fails(layer: TaskHead, values: Tensors, start: Start) -> None:
        raise MemoryError

    monkeypatch.setattr(TaskHead, "open", fails)
    with pytest.raises(MemoryError):
        net.begin_task("a", 2)
    monkeypatch.undo()
    assert not list(net.parameters())
    assert net.learning is None
    assert rankup.fit(net, clusters(classes=2), QUICK).tasks


def rival(name: str, tasks: list[Task]) -> DenseMethod:
    module, grow = rankup.models.mlp(12, hidden=[16]), GrowOptions(Rank(1, 1))
    setting = Setting(module, grow, QUICK, 0, tasks, method_options(name, {}))
    method = method_class(name)(setting)
    assert isinstance(method, DenseMethod)
    return method


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("name", ["finetune", "multitask"])
def test_interrupted_commit_of_a_rival_is_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [clusters(f"task {seed}", classes=2, seed=seed) for seed in (0, 1)]
    method = rival(name, tasks)
    interrupt_install(type(method.head), monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        method.learn(tasks[0], None, None)
    monkeypatch.undo()
    assert method.learned == (2 if name == "multitask" else 1)
    right = method.predict(tasks[0].test_x, 0)[:, :2].argmax(1) == tasks[0].test_y
    assert right.float().mean() > 0.9
    if name != "multitask":
        method.learn(tasks[1], None, None)
        assert method.learned == 2


@pytest.mark.parametrize("name", ["finetune", "packnet"])
def test_failed_begin_of_a_rival_restores_its_state(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = clusters(classes=2)
    method = rival(name, [task])
    before = {key: value.clone() for key, value in method.body.state_dict().items()}

    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(type(method.head), "start", fails)
    with pytest.raises(MemoryError):
        method.begin(task)
    monkeypatch.undo()
    method.abandon()
    after = method.body.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    method.learn(task, None, None)
    assert method.learned == 1


@pytest.mark.usefixtures("handlers")
def test_interrupted_commit_leaves_norms_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    net, x = rankup.grow(module, rankup.Rank(2, 1), exclude="1"), torch.randn(32, 8)
    net.begin_task("a", 3)
    net(x, task="a")
    interrupt_install(TaskHead, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        net.commit_task()
    assert net.tasks == ["a"]
    before = net.body.get_buffer("1.running_mean").clone()
    net(5 * x + 3, task="a")
    assert torch.equal(net.body.get_buffer("1.running_mean"), before)

"""Several threads at once, and modules that draw or keep things besides what is learned."""

import gc
import random
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rankup
from helpers.threads import (
    meanwhile,
)
from helpers.zoo import GPU
from rankup.data.tasks import Task
from rankup.training import memory_format
from rankup.training.batches import in_equal_parts
from rankup.training.checkpoint import Checkpoint
from rankup.training.engine.rank import RankLearner
from rankup.training.loop import Epoch

DIGITS = rankup.data.make_stream("s-digits", tasks=2)
FEW = rankup.Recipe(epochs=8)


def knowing_a_task() -> tuple[rankup.IncrementalNet, Tensor]:
    """A network, and what it can be asked."""
    net = rankup.grow(rankup.models.mlp(8, [16]), rankup.Rank(2, 1))
    net.begin_task("a", 3)
    net.commit_task()
    return net.eval(), torch.randn(4, 8)


def test_networks_answer_while_others_are_grown() -> None:
    net, x = knowing_a_task()
    answer, answers = net(x, task=0), Counter[bool]()
    with meanwhile(lambda: answers.update([torch.equal(net(x, task=0), answer)])):
        for _ in range(20):
            rankup.grow(rankup.models.mlp(8, [16]), rankup.Rank(2, 1))
    assert answers.keys() == {True}


def test_networks_are_grown_in_several_threads() -> None:
    module, before = rankup.models.mlp(8, [16]), nn.Module.__call__
    with meanwhile(lambda: rankup.grow(module, rankup.Rank(2, 1))):
        for _ in range(20):
            assert rankup.grow(module, rankup.Rank(2, 1)).plan.chain
    assert nn.Module.__call__ is before


class Waiting(nn.Module):
    """Makes the thread called B wait in its first forward."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts, self.head = nn.Sequential(*parts), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.parts(x)
        if threading.current_thread().name == "B" and not IS_INSIDE.is_set():
            IS_INSIDE.set()
            GO_ON.wait()
        answer: Tensor = self.head(y)
        return answer


IS_INSIDE, GO_ON = threading.Event(), threading.Event()


@contextmanager
def asked_for_its_accuracy(net: rankup.IncrementalNet, task: Task) -> Iterator[None]:
    """Another thread is in the middle of that, inside, unless `GO_ON` is set."""
    IS_INSIDE.clear()
    GO_ON.clear()
    thread = threading.Thread(target=lambda: rankup.accuracy(net, task), name="B")
    thread.start()
    assert IS_INSIDE.wait(20)
    try:
        yield
    finally:
        GO_ON.set()
        thread.join()


def test_commit_while_another_thread_tries_channels_last() -> None:
    convolution = nn.Conv2d(1, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    net, x = rankup.grow(Waiting(*convolution), rankup.Rank(2, 1)), torch.rand(4, 1, 8, 8)
    net.begin_task(DIGITS[0].name, DIGITS[0].classes)
    net.commit_task()
    net.eval()
    memory_format._FOUND.clear()
    with asked_for_its_accuracy(net, DIGITS[0]):
        net.begin_task("b", 2)
        net(x, task="b").sum().backward()
        assert all(p.grad is not None for p in net.parameters())
        net.commit_task()
        answer = net(x, task="b")
    assert torch.equal(net(x, task="b"), answer)


class Drawing(nn.Module):
    """Skips a layer at random, as drawn by Python and NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x.flatten(1)).relu()
        if not self.training or random.random() < 0.8 * np.random.rand():  # noqa: NPY002
            x = x + self.b(x).relu()
        answer: Tensor = self.head(x)
        return answer


def learned(**options: Any) -> dict[str, Tensor]:
    net = rankup.grow(Drawing(), rankup.Rank(4, 1))
    rankup.fit(net, DIGITS[0], FEW, **options)
    return net.state_dict()


def test_what_python_draws_follows_from_seed() -> None:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    expected = random.random(), np.random.rand()  # noqa: NPY002
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    kept: list[Checkpoint] = []
    one = learned(on_epoch=lambda _, checkpoint: kept.append(checkpoint))
    assert (random.random(), np.random.rand()) == expected  # noqa: NPY002
    other, resumed = learned(), learned(resume=kept[3])
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name])
        assert torch.equal(tensor, resumed[name])


@GPU
def test_steps_with_python_randomness_are_not_captured() -> None:
    net = rankup.grow(Drawing(), rankup.Rank(4, 1)).to("cuda")
    with pytest.warns(UserWarning, match="cannot be captured: the module draws random numbers"):
        rankup.fit(net, DIGITS[0].to("cuda"), FEW)


def test_epochs_that_are_kept_keep_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, init = weakref.WeakSet[RankLearner](), RankLearner.__init__

    def noted(self: RankLearner, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        alive.add(self)

    monkeypatch.setattr(RankLearner, "__init__", noted)
    net, epochs = rankup.grow(rankup.models.mlp(64), rankup.Rank(11, 1)), list[Epoch]()
    rankup.fit(net, DIGITS[0], FEW, on_epoch=lambda epoch, _: epochs.append(epoch))
    gc.collect()
    assert len(epochs) == 8
    assert not alive
    with pytest.raises(rankup.TaskStateError, match="only while the task is being learned"):
        epochs[0].accuracy()


@pytest.mark.parametrize(("rows", "most"), [(76_801, 256), (10, 4), (2049, 2048), (5, 8)])
def test_equal_parts_are_equal(rows: int, most: int) -> None:
    sizes = [len(part) for part in in_equal_parts(torch.zeros(rows), most)]
    assert sum(sizes) == rows
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1

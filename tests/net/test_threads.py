"""What one thread does, another does not notice."""

import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rankup
from helpers.clusters import QUICK, clusters
from helpers.threads import meanwhile
from helpers.zoo import taught
from rankup.rank import Rank
from rankup.seeds import drawn_from


def test_threads_that_load_leave_all_generators_as_they_were(tmp_path: Path) -> None:
    rankup.save(taught("mlp"), tmp_path)
    before = drawn_from()
    with meanwhile(lambda: rankup.load(tmp_path), threads=4):
        for _ in range(8):
            rankup.load(tmp_path)
    assert drawn_from() == before


def plain() -> nn.Module:
    """With a norm that is folded, which needs a trace, and with dropout, which draws."""
    layers = nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(40, 3))


def dropping() -> rankup.IncrementalNet:
    torch.manual_seed(0)
    return rankup.grow(plain(), Rank(2, 1)).eval()


def image(name: str, seed: int = 0) -> rankup.Task:
    task = clusters(name, seed=seed)
    x, test = task.train_x[:, None], task.test_x[:, None]
    return rankup.Task(name, task.classes, x, task.train_y, test, task.test_y)


def test_serving_meanwhile_does_not_change_what_is_learned(tmp_path: Path) -> None:
    first, second, found = image("first"), image("second", seed=1), []
    for busy in (False, True):
        net = rankup.fit(dropping(), first, QUICK)
        rankup.save(net, tmp_path / f"{busy}")
        module, before = plain(), drawn_from()

        def serve(net: rankup.IncrementalNet = net, module: nn.Module = module) -> None:
            net.merged("first")(first.test_x)
            rankup.load(tmp_path / "True", module)

        with meanwhile(serve) if busy else nullcontext():
            rankup.fit(net, second, replace(QUICK, epochs=60))
        assert drawn_from() == before
        found.append(net(second.test_x, "second"))
    assert torch.equal(*found)


def test_accuracy_is_refused_while_another_thread_teaches() -> None:
    first, second, said = image("first"), image("second", seed=1), list[str]()
    net = rankup.fit(dropping(), first, QUICK)
    before = rankup.accuracy(net, first)

    def ask() -> None:
        with pytest.raises(rankup.TaskStateError, match="another thread teaches") as refused:
            rankup.accuracy(net, first)
        said.append(str(refused.value))

    def look(*_: object) -> None:
        assert rankup.accuracy(net, first) == before  # here it is the same thread
        asking = threading.Thread(target=ask)
        asking.start()
        asking.join()

    rankup.fit(net, second, QUICK, on_epoch=look)
    assert len(said) == QUICK.epochs
    assert not net.training
    assert rankup.accuracy(net, first) == before


def test_accuracies_in_threads_leave_the_mode_as_it_was() -> None:
    task = image("first")
    net = rankup.fit(dropping(), task, QUICK).train()
    right = rankup.accuracy(net, task)
    found = list[float]()
    with meanwhile(lambda: found.append(rankup.accuracy(net, task)), threads=3):
        found += [rankup.accuracy(net, task) for _ in range(20)]
    assert set(found) == {right}
    assert net.training


class Counting(nn.Module):
    """Changes a buffer by answering in training mode."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(12, 8), nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.add_(x.detach().mean(0))
            time.sleep(0.01)  # long enough for others to begin
        answer: Tensor = self.head(self.hidden(x - self.seen).relu())
        return answer


def test_threads_that_answer_in_training_mode_change_nothing() -> None:
    x = torch.rand(6, 12)
    net = rankup.grow(Counting(), Rank(2, 1), base="keep")
    net.begin_task("a", 3)
    net.commit_task()
    before = net.eval()(x, task=0)
    net.train()
    with meanwhile(lambda: net(x, task=0), threads=4):
        for _ in range(100):
            net(x, task=0)
    assert torch.equal(net.eval()(x, task=0), before)


def test_a_copy_may_be_made_while_tasks_come_and_go() -> None:
    """Tables of parameters are exchanged, not changed, so that no loop over one breaks."""
    net = taught("mlp", tasks=[3])
    before = [part._parameters for part in net.modules()]
    net.begin_task("next", 3)
    opened = [part._parameters for part in net.modules()]
    kept = [dict(table) for table in opened]
    assert not any(before)
    assert any(opened)
    net.abandon_task()
    assert opened == kept

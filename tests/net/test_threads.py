"""What one thread does, another does not notice."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import rankup
from helpers.clusters import QUICK, clusters
from helpers.threads import meanwhile
from helpers.zoo import taught
from rankup.rank import Rank
from rankup.seeds import drawn_from


def test_threads_that_load_leave_generators_alone(tmp_path: Path) -> None:
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


def test_serving_does_not_change_what_is_learned(tmp_path: Path) -> None:
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


def test_accuracies_in_threads_leave_mode_as_it_was() -> None:
    task = image("first")
    net = rankup.fit(dropping(), task, QUICK).train()
    right = rankup.accuracy(net, task)
    found = list[float]()
    with meanwhile(lambda: found.append(rankup.accuracy(net, task)), threads=3):
        found += [rankup.accuracy(net, task) for _ in range(20)]
    assert set(found) == {right}
    assert net.training


def test_copy_may_be_made_while_tasks_come_and_go() -> None:
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

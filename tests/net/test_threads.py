"""Answers, growing and loading in several threads."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rankup
from helpers.clusters import QUICK, clusters
from helpers.threads import meanwhile
from helpers.zoo import (
    RANKS,
    assert_same_bits,
    inputs,
    logits,
    taught,
    teach,
)
from rankup.rank import Rank
from rankup.seeds import rng_states


def test_threads_that_load_leave_generators_alone(tmp_path: Path) -> None:
    rankup.save(taught("mlp"), tmp_path)
    before = rng_states()
    with meanwhile(lambda: rankup.load(tmp_path), threads=4):
        for _ in range(8):
            rankup.load(tmp_path)
    assert rng_states() == before


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
        module, before = plain(), rng_states()

        def serve(net: rankup.IncrementalNet = net, module: nn.Module = module) -> None:
            net.merged("first", fold=True)(first.test_x)
            rankup.load(tmp_path / "True", module)

        with meanwhile(serve) if busy else nullcontext():
            rankup.fit(net, second, replace(QUICK, epochs=20))
        assert rng_states() == before
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
        for _ in range(8):
            rankup.grow(rankup.models.mlp(8, [16]), rankup.Rank(2, 1))
    assert answers.keys() == {True}


def test_networks_are_grown_in_several_threads() -> None:
    module, before = rankup.models.mlp(8, [16]), nn.Module.__call__
    with meanwhile(lambda: rankup.grow(module, rankup.Rank(2, 1))):
        for _ in range(8):
            assert rankup.grow(module, rankup.Rank(2, 1)).plan.chain
    assert nn.Module.__call__ is before


def test_eight_threads_run_different_tasks_at_once() -> None:
    net = taught("convolutions", tasks=(3, 2, 4, 5, 2, 3, 6, 4), rank=RANKS["with seeded"])
    batches = [inputs("convolutions", batch=16, seed=seed) for seed in range(8)]
    alone = [[net(x, task=task) for x in batches] for task in range(8)]
    mixed = torch.arange(16) % 8
    mixed_alone = [net(x, task=mixed) for x in batches]

    def run(task: int) -> None:
        for _ in range(4):
            for x, expected, expected_mixed in zip(batches, alone[task], mixed_alone, strict=True):
                assert torch.equal(net(x, task=task), expected)
                assert torch.equal(net(x, task=mixed), expected_mixed)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(8)))


@pytest.mark.parametrize("kind", ["mlp", "transformer", "convolutions"])
def test_threads_answer_while_task_is_learned(kind: str) -> None:
    net = taught(kind)
    x = inputs(kind)
    expected = logits(net, x)
    with ThreadPoolExecutor(2) as pool:
        learning = pool.submit(
            lambda: [teach(net, f"later {i}", inputs(kind, seed=i), steps=5) for i in range(8)]
        )
        while not learning.done():
            assert_same_bits(expected, [net(x, task=task) for task in range(3)])
        learning.result()
    assert len(net.tasks) == 11


@pytest.mark.parametrize("kind", ["mlp", "transformer", "convolutions"])
def test_threads_answer_mixed_batches_during_commits(kind: str) -> None:
    net = taught(kind)
    x, tasks = inputs(kind), torch.arange(6) % 3
    expected = net(x, task=tasks)

    def commit() -> None:
        for index in range(15):
            net.begin_task(f"later {index}", classes=2 + index % 3)
            net.commit_task(calibrate=[x])

    with ThreadPoolExecutor(1) as pool:
        committing = pool.submit(commit)
        while not committing.done():
            # How a layer computes depends on its number of tasks, and rounding depends on that.
            torch.testing.assert_close(net(x, task=tasks), expected, rtol=1e-4, atol=1e-4)
        committing.result()
    assert len(net.tasks) == 18

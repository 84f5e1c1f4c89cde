"""An `on_epoch` callback may query the network without changing anything."""

import threading

import pytest
import torch
from torch import Tensor, nn

import rankup
from helpers.clusters import QUICK, clusters, net
from helpers.zoo import assert_same_bits, logits
from rankup.rank import Rank
from rankup.training.checkpoint import Checkpoint, CheckpointError
from rankup.training.loop import Epoch
from rankup.training.recipe import Recipe


def test_network_answers_in_on_epoch() -> None:
    task, network, found = clusters(), net(), list[tuple[float, float]]()

    def look(epoch: Epoch, checkpoint: Checkpoint) -> None:
        own = float((network(task.train_x, task.name).argmax(1) == task.train_y).float().mean())
        found.append((own, epoch.accuracy()))

    rankup.fit(network, task, QUICK, on_epoch=look)
    assert all(own == pytest.approx(told) for own, told in found)
    assert found[-1][0] > 0.9


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
        told = (lambda *_: network.eval()) if look else None
        return rankup.fit(network, clusters(), QUICK, on_epoch=told)

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


def test_checkpoint_of_a_smaller_network_is_refused() -> None:
    """If no task adds factors, its tensors would fit."""
    kept: list[Checkpoint] = []
    first, second = clusters("first"), clusters("second", seed=1)
    rank = Rank(0, 0, seeded=32)
    rankup.fit(net(rank=rank), second, QUICK, on_epoch=lambda _, point: kept.append(point))
    network = rankup.fit(net(rank=rank), first, QUICK)
    with pytest.raises(CheckpointError, match="knew 0 tasks, but this one knows 1"):
        rankup.fit(network, second, QUICK, resume=kept[2])
    assert network.tasks == ["first"]


def test_networks_that_learn_in_threads_learn_as_each_alone() -> None:
    module = nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    *several, one = (rankup.grow(module, Rank(2, 1)) for _ in range(4))
    x, found = clusters().test_x, list[Tensor]()

    def learned(network: rankup.IncrementalNet) -> Tensor:
        answer: Tensor = rankup.fit(network, clusters(), QUICK).eval()(x, "clusters")
        return answer

    deterministic, drawn = torch.backends.cudnn.deterministic, torch.get_rng_state()
    threads = [
        threading.Thread(target=lambda network=network: found.append(learned(network)))
        for network in several
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.backends.cudnn.deterministic == deterministic
    assert torch.equal(torch.get_rng_state(), drawn)
    alone = learned(one)
    assert len(found) == 3
    assert all(torch.equal(answer, alone) for answer in found)


def test_accuracy_refuses_other_numbers_of_classes() -> None:
    network, task = net(), clusters()
    rankup.fit(network, task, QUICK)
    with pytest.raises(rankup.RankupError, match="'clusters' with 3 classes, but this one has 5"):
        rankup.accuracy(network, clusters(classes=5))


def test_two_steps_learn_an_easy_task() -> None:
    x = torch.cat([-torch.ones(64, 12), torch.ones(64, 12)])
    y = (torch.arange(128) >= 64).long()
    task = rankup.Task("apart", 2, x, y, x, y)
    network = rankup.fit(net(), task, Recipe(epochs=2, batch=128, lr=0.1))
    assert rankup.accuracy(network, task) > 0.9

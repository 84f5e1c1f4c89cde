"""What frozen factors see of a task's inputs, computed once."""

import pytest
import torch
from torch import Tensor

import rankup
from helpers.clusters import CPU, QUICK, clusters, net, right
from rankup.layers import active
from rankup.rank import Rank
from rankup.training.batches import Feed
from rankup.training.engine.rank import RankLearner


@pytest.mark.parametrize("rank", [Rank(2, 1), Rank(0, 0, seeded=20), Rank(1, 1, seeded=9)])
def test_precomputed_projection_equals_network(rank: Rank) -> None:
    network = net(rank=rank)
    for seed in range(2):
        rankup.fit(network, clusters(f"{seed}", seed=seed), QUICK)
    network.begin_task("open", 3)
    feed = Feed(clusters("open", seed=5), QUICK, CPU)
    rows = torch.tensor([7, 3, 3, 150])
    learner = RankLearner(network, feed)
    with active(2):
        fast = learner.logits({"rows": rows})
    plain = network(feed.task.train_x[rows], "open")
    torch.testing.assert_close(fast, plain)
    assert network.plan.first == "hidden.0"
    for one, other in zip(
        torch.autograd.grad(fast.square().sum(), list(network.parameters())),
        torch.autograd.grad(plain.square().sum(), list(network.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


class PerPosition(torch.nn.Module):
    """A Linear reads every position of a sequence, or the batch and the positions together."""

    def __init__(self, folds: bool) -> None:
        super().__init__()
        self.folds = folds
        self.hidden, self.head = torch.nn.Linear(4, 16), torch.nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.hidden(x.flatten(0, 1) if self.folds else x).relu()
        return self.head(y.view(len(x), 3, 16).mean(1))


@pytest.mark.parametrize("folds", [False, True])
def test_layer_that_reads_parts_of_samples_is_not_projected(folds: bool) -> None:
    task = clusters()
    shaped = [x.view(-1, 3, 4) for x in (task.train_x, task.test_x)]
    sequences = rankup.Task("a", 3, shaped[0], task.train_y, shaped[1], task.test_y)
    network = rankup.grow(PerPosition(folds), Rank(2, 1), head="head")
    rankup.fit(network, sequences, QUICK)
    assert right(network, sequences) > 0.9

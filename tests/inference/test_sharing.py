"""Where a task's weights come from, against weights built by hand."""

import torch

import rankup
from helpers.serving import network
from rankup.inference.sharing import factor_shares
from rankup.layers import FactoredLayer


def test_shares_are_those_of_the_factors_squared_norms() -> None:
    net = network(2, 3, 2)
    wanted = torch.zeros(3, dtype=torch.float64)
    for layer in net.layers:
        if isinstance(layer, FactoredLayer):
            edges = [0, 3, 4, 5]  # a rank of 3 for the first task, 1 for each of the others
            for task in range(3):
                for factor in range(edges[task], edges[task + 1]):
                    weight = layer.S[2, factor] * torch.outer(layer.U[factor], layer.V[factor])
                    wanted[task] += weight.double().square().sum()
    wanted /= wanted.sum()
    seeded, *shares = factor_shares(net)[2]
    assert seeded == 0
    torch.testing.assert_close(torch.tensor(shares).double(), wanted, rtol=0, atol=1e-4)
    assert min(shares) > 0.001


def test_seeded_factors_are_counted_first() -> None:
    net = rankup.grow(rankup.models.mlp(6, hidden=[5]), rankup.Rank(0, 0, seeded=4))
    net.begin_task("only", 2)
    net.commit_task()
    assert factor_shares(net) == [[1.0, 0.0]]


def test_network_without_tasks_has_no_shares() -> None:
    assert factor_shares(network()) == []

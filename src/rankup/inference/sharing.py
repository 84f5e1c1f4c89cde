"""How much of each task's weights comes from the factors of which task."""

import torch
from torch import Tensor

from rankup.layers import FactoredLayer
from rankup.net.network import IncrementalNet

Shares = list[list[float]]


@torch.no_grad()
def factor_shares(net: IncrementalNet) -> Shares:
    """For each task, which shares of its weights come from seeded factors, from the factors of the
    first task, of the second, and so on up to its own. The shares of a task sum to 1.

    A factor counts by the square of what it adds to a layer's weights, `(s · |u| · |v|)²`.

    >>> import rankup
    >>> net = rankup.grow(rankup.models.mlp(4, hidden=[8]), rankup.Rank(2, 1))
    >>> for name in ("first", "second"):
    ...     net.begin_task(name, classes=2)
    ...     net.commit_task()
    >>> factor_shares(net)  # selectors over other tasks' factors start at 0
    [[0.0, 1.0], [0.0, 0.0, 1.0]]
    """
    count = len(net.tasks)
    total = torch.zeros(count, count + 1, dtype=torch.float64)  # [task, seeded and whose factors]
    for layer in net.layers:
        if isinstance(layer, FactoredLayer):
            total += _of_layer(layer, count)
    total /= total.sum(1, keepdim=True).clamp(min=1e-300)
    return [[round(share, 4) for share in row[: at + 2]] for at, row in enumerate(total.tolist())]


def _of_layer(layer: FactoredLayer, count: int) -> Tensor:
    ends = layer.ends[: count + 1]  # seeded factors first, then each task's
    U, V, S = (table.double().cpu() for table in (layer.U, layer.V, layer.S))
    added = S[:count].square() * (U.square().sum(1) * V.square().sum(1))  # [T, R]
    sums = torch.nn.functional.pad(added.cumsum(1), (1, 0))[:, [0, *ends]]
    return sums.diff(dim=1)  # [T, 1 + T]

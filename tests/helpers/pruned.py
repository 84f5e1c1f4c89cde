"""Networks whose tasks have dropped factors, without learning when to."""

import torch
from torch import nn

import rankup
from helpers.zoo import inputs, module
from rankup.layers import FactoredLayer, TaskHead
from rankup.layers.rounding import Store


def grown(
    store: Store = "full", kind: str = "mlp", prune: bool = True, **options: object
) -> rankup.IncrementalNet:
    torch.manual_seed(0)
    rank = rankup.Rank(3, 2, seeded=20, prune=prune)
    return rankup.grow(module(kind), rank, store=store, **options)


def drop(net: rankup.IncrementalNet, name: str, kind: str = "mlp", **begin: object) -> None:
    """Add a task that drops every third factor, its own last one among them, and every other bias
    and weight of its head."""
    net.begin_task(name, 3, **begin)
    draw = torch.Generator().manual_seed(len(net.tasks))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
        for layer in net.layers:
            for key in ("bias", "weight"):
                if isinstance(layer, FactoredLayer | TaskHead) and hasattr(layer, f"new_{key}"):
                    getattr(layer, f"new_{key}").view(-1)[::2] = 0
            if isinstance(layer, FactoredLayer):
                layer.new_selector[::3] = 0
                layer.new_selector[-1] = 0
    net.commit_task(calibrate=[inputs(kind)])


def factored(net: nn.Module) -> list[FactoredLayer]:
    return [layer for layer in net.modules() if isinstance(layer, FactoredLayer)]

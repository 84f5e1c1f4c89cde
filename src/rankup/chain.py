"""The step of a network that is a chain of Linears with a ReLU after each, written by hand.

Most of such a step's time goes to starting operations. Without autograd there are half as many,
and what is frozen costs nothing. All tensors may have a leading dimension of replicas, in which
case one operation serves them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from rankup.feed import Draws, Feed, places, take_places
from rankup.layers import FactoredLinear, TaskHead, Tensors, dense_is_cheaper
from rankup.learner import RankLearner
from rankup.network import IncrementalNet


class ChainLearner(RankLearner):
    def __init__(self, net: IncrementalNet, feed: Feed, pad: int = 1) -> None:
        super().__init__(net, feed, pad)
        self.replicas = "stacked"
        self._chain = chain_layers(net)
        self._heads = [part for part in net.parts if isinstance(part, TaskHead)]
        self._names = [f"body.{name}" for name, _ in net.body.named_parameters()]

    @torch.no_grad()
    def gradient(self, draw: Draws) -> tuple[Tensor, Sequence[Tensor]]:
        first, (head,) = self._chain[0], self._heads
        at = places(draw["rows"], self.y.shape[-1])
        seen = None if self.seen is None else take_places(self.seen, at)
        reads_x = seen is None or first.spec.rank.added(self.index) > 0
        x = self.feed.batch(self.x, draw, at).flatten(at.dim()) if reads_x else None
        passes: list[Pass] = []
        for layer in self._chain:
            passes.append(_forward(layer, x, seen))
            x, seen = passes[-1].y, None
        assert x is not None
        logits = _affine(head.new_bias if head.spec.bias else None, x, head.new_weight.mT)
        loss, grad = _cross_entropy(logits, take_places(self.y, at))
        grads = {f"body.{head.spec.name}.new_weight": grad.mT @ x}
        if head.spec.bias:
            grads[f"body.{head.spec.name}.new_bias"] = grad.sum(-2)
        to_y: Tensor | None = grad @ head.new_weight
        for layer, done in zip(reversed(self._chain), reversed(passes), strict=True):
            assert to_y is not None
            own, to_y = _backward(layer, done, to_y, wants_x=layer is not first)
            grads |= {f"body.{layer.spec.name}.new_{key}": g for key, g in own.items()}
        return loss, [grads[name] for name in self._names]


def chain_layers(net: IncrementalNet) -> list[FactoredLinear]:
    layers = (net.body.get_submodule(name) for name in net.plan.chain or ())
    return [layer for layer in layers if isinstance(layer, FactoredLinear)]


def is_chain(net: IncrementalNet, feed: Feed) -> bool:
    """Whether the network and the recipe are of the kind whose step is written out here."""
    if feed.recipe.loss != "cross-entropy" or feed.recipe.precision == "bfloat16":
        return False
    layers, task = chain_layers(net), len(net.tasks)
    return (
        bool(layers)
        and feed.x[0].numel() == layers[0].in_features
        and not any(
            layer.base_weight is not None
            or dense_is_cheaper(
                feed.batch_size, layer.spec.rank.used(task), layer.in_features, layer.out_features
            )
            for layer in layers
        )
    )


class Pass(NamedTuple):
    """What a layer's backward pass needs to know of its forward pass."""

    x: Tensor | None  # [B, in]; None where only its projection was looked at
    hidden: Tensor  # [B, R]: x Vᵀ
    scaled: Tensor  # [B, R]: hidden times the selector
    y: Tensor  # [B, out], after the ReLU
    U: Tensor  # [R, out]
    V: Tensor  # [R, in], or of the first layer just the new ones


def _forward(layer: FactoredLinear, x: Tensor | None, seen: Tensor | None) -> Pass:
    added = layer.spec.rank.added(layer.count)
    U = torch.cat([layer.U, layer.new_U], -2) if added else layer.U
    if seen is None:
        V = torch.cat([layer.V, layer.new_V], -2) if added else layer.V
        assert x is not None
        hidden = x @ V.mT
    else:
        V = layer.new_V if added else layer.V
        hidden = seen if x is None else torch.cat([seen, x @ V.mT], -1)
    scaled = hidden * layer.new_selector.unsqueeze(-2)
    y = _affine(layer.new_bias if layer.spec.bias else None, scaled, U).relu_()
    return Pass(x, hidden, scaled, y, U, V)


def _backward(
    layer: FactoredLinear, done: Pass, to_y: Tensor, *, wants_x: bool
) -> tuple[Tensors, Tensor | None]:
    """Gradients by what the layer learns, and by its input where that is wanted."""
    added = layer.spec.rank.added(layer.count)
    grad = torch.ops.aten.threshold_backward(to_y, done.y, 0)
    to_scaled = grad @ done.U.mT  # [B, R]
    grads = {"selector": (to_scaled * done.hidden).sum(-2)}
    if layer.spec.bias:
        grads["bias"] = grad.sum(-2)
    selector = layer.new_selector.unsqueeze(-2)
    # The first layer's old factors pass nothing on: its new ones are all that is wanted.
    wanted = slice(None) if wants_x else slice(to_scaled.shape[-1] - added, None)
    to_hidden = to_scaled[..., wanted] * selector[..., wanted] if wants_x or added else to_scaled
    if added:
        assert done.x is not None
        grads["U"] = done.scaled[..., -added:].mT @ grad
        grads["V"] = to_hidden[..., -added:].mT @ done.x
    return grads, to_hidden @ done.V if wants_x else None


def _cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The mean loss of a batch, and its gradient by the logits."""
    batch = labels.shape[-1]
    column = labels.unsqueeze(-1)
    logs = logits.log_softmax(-1)
    loss = logs.gather(-1, column).sum((-2, -1)) * (-1 / batch)
    # The softmax less one at the label, over the batch.
    share = logs.exp_().mul_(1 / batch)
    share.scatter_add_(
        -1, column, _filled(-1 / batch, share.dtype, share.device).expand(column.shape)
    )
    return loss, share


@cache  # so that a captured step does not make it again and again
def _filled(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)


def _affine(bias: Tensor | None, x: Tensor, weight: Tensor) -> Tensor:
    if bias is None:
        return x @ weight
    if x.dim() == 2:
        return torch.addmm(bias, x, weight)
    return torch.baddbmm(bias.unsqueeze(-2), x, weight)

"""The step of a network that is a chain of Linears with a ReLU after each, written by hand.

Most of such a step's time goes to starting operations. Without autograd there are half as many,
and what is frozen costs nothing. All tensors may have a leading dimension of replicas, in which
case one operation serves them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from rankup.data.transforms import to_float
from rankup.feed import Draws, Feed, places, take_places
from rankup.layers import FactoredLinear, TaskHead, Tensors, dense_is_cheaper
from rankup.learner import MOST_BYTES, RankLearner
from rankup.network import IncrementalNet


class ChainLearner(RankLearner):
    def __init__(self, net: IncrementalNet, feed: Feed, pad: int = 1) -> None:
        super().__init__(net, feed, pad)
        self.replicas = "stacked"
        self._chain = chain_layers(net)
        self._heads = [part for part in net.parts if isinstance(part, TaskHead)]
        self._names = [f"body.{name}" for name, _ in net.body.named_parameters()]
        # A GPU gathers numbers as fast as bytes, so they may as well be scaled before.
        made = feed.made
        self._is_ready = made is not None and made.is_cuda and 4 * made.numel() <= MOST_BYTES
        if made is not None and self._is_ready:
            self.x = self._reads["x"] = feed.scaled(to_float(made)).flatten(1)

    @torch.no_grad()
    def gradient(self, draw: Draws) -> tuple[Tensor, Sequence[Tensor]]:
        first, (head,) = self._chain[0], self._heads
        at = places(draw["rows"], self.y.shape[-1])
        with self.aside():
            labels = take_places(self.y, at)
            tables = [
                _tables(layer, layer is first and self.seen is not None) for layer in self._chain
            ]
        seen = None if self.seen is None else take_places(self.seen, at)
        reads_x = seen is None or first.spec.rank.added(self.index) > 0
        x = self._batch(draw, at) if reads_x else None
        self.join()
        passes: list[Pass] = []
        for layer, (U, V) in zip(self._chain, tables, strict=True):
            passes.append(_forward(layer, x, seen, U, V))
            x, seen = passes[-1].y, None
        assert x is not None
        logits = _affine(head.new_bias if head.spec.bias else None, x, head.new_weight.mT)
        logs = logits.log_softmax(-1)
        with self.aside():
            loss = logs.gather(-1, labels.unsqueeze(-1)).sum((-2, -1)) * (-1 / labels.shape[-1])
        grad = _to_logits(logs, labels)
        name = f"body.{head.spec.name}.new_"
        with self.aside(1):
            grads = {f"{name}weight": grad.mT @ x}
            if head.spec.bias:
                grads[f"{name}bias"] = grad.sum(-2)
        to_y, held = grad @ head.new_weight, []
        for layer, done in zip(reversed(self._chain), reversed(passes), strict=True):
            back = self._backward(layer, done, to_y, wants_x=layer is not first)
            grads |= {f"body.{layer.spec.name}.new_{key}": g for key, g in back.grads.items()}
            held.append(back)
            to_y = back.to_x if back.to_x is not None else to_y
        self.join()
        return loss, [grads[name] for name in self._names]

    def _batch(self, draw: Draws, at: Tensor) -> Tensor:
        if self._is_ready:
            return take_places(self.x, at)
        return self.feed.batch(self.x, draw, at).flatten(at.dim())

    def _backward(
        self, layer: FactoredLinear, done: Pass, to_y: Tensor, *, wants_x: bool
    ) -> Backward:
        """Gradients by what the layer learns, and by its input where that is wanted. The way on to
        the layer before comes first; all else may be computed aside."""
        added, grads = layer.spec.rank.added(layer.count), {}
        grad = torch.ops.aten.threshold_backward(to_y, done.y, 0)
        with self.aside():
            if layer.spec.bias:
                grads["bias"] = grad.sum(-2)
            if added:
                grads["U"] = done.scaled[..., -added:].mT @ grad
        to_scaled = grad @ done.U.mT  # [B, R]
        with self.aside(1):
            grads["selector"] = (to_scaled * done.hidden).sum(-2)
        if not (wants_x or added):
            return Backward(grads, None, (grad, to_scaled))
        # The first layer's old factors pass nothing on: its new ones are all that is wanted.
        wanted = slice(None) if wants_x else slice(to_scaled.shape[-1] - added, None)
        to_hidden = to_scaled[..., wanted] * layer.new_selector.unsqueeze(-2)[..., wanted]
        if added:
            assert done.x is not None
            with self.aside(1) if wants_x else nullcontext():
                grads["V"] = to_hidden[..., -added:].mT @ done.x
        to_x = to_hidden @ done.V if wants_x else None
        return Backward(grads, to_x, (grad, to_scaled, to_hidden))


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


class Backward(NamedTuple):
    """What a layer's backward pass gives, and what it was computed from."""

    grads: Tensors
    to_x: Tensor | None
    held: tuple[Tensor, ...]


def _tables(layer: FactoredLinear, is_projected: bool) -> tuple[Tensor, Tensor]:
    """Old and new factors, U and V; of a layer whose old ones have seen the data, just new V."""
    if not layer.spec.rank.added(layer.count):
        return layer.U, layer.V
    U = torch.cat([layer.U, layer.new_U], -2)
    return U, layer.new_V if is_projected else torch.cat([layer.V, layer.new_V], -2)


def _forward(
    layer: FactoredLinear, x: Tensor | None, seen: Tensor | None, U: Tensor, V: Tensor
) -> Pass:
    if x is None:
        assert seen is not None
        hidden = seen
    else:
        hidden = x @ V.mT
        hidden = hidden if seen is None else torch.cat([seen, hidden], -1)
    scaled = hidden * layer.new_selector.unsqueeze(-2)
    y = _affine(layer.new_bias if layer.spec.bias else None, scaled, U).relu_()
    return Pass(x, hidden, scaled, y, U, V)


def _to_logits(logs: Tensor, labels: Tensor) -> Tensor:
    """The gradient of the mean cross-entropy by the logits, whose log-softmax is given: the softmax
    less one at the label, over the batch."""
    share, column = logs.exp(), labels.unsqueeze(-1)
    minus = _filled(-1.0, logs.dtype, logs.device).expand(column.shape)
    return share.scatter_add_(-1, column, minus).mul_(1 / labels.shape[-1])


@cache  # so that a captured step does not make it again and again
def _filled(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)


def _affine(bias: Tensor | None, x: Tensor, weight: Tensor) -> Tensor:
    if bias is None:
        return x @ weight
    if x.dim() == 2:
        return torch.addmm(bias, x, weight)
    return torch.baddbmm(bias.unsqueeze(-2), x, weight)

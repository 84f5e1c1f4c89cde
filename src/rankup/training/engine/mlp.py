"""The learner of a chain of Linears with a ReLU after each, with gradients written by hand.

Such a step mostly takes the time of starting operations. Without autograd there are half as many,
and none for frozen factors. All tensors may have a leading dimension of replicas, so that one
operation serves several seeds.

Activations are `[features, batch]`: on a CPU a product with few factors then takes half the time of
that with `[batch, features]`, and a softmax over few classes a sixth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from rankup.layers import FactoredLinear, TaskHead, Tensors, active, dense_is_cheaper
from rankup.net.network import IncrementalNet
from rankup.training.batches import Draws, Feed, flat_rows, take_flat
from rankup.training.engine.rank import MOST_BYTES, RankLearner, runs_as_traced
from rankup.training.memory_format import trial

Product = Callable[[Tensor, Tensor], Tensor]

# Up to this many multiplications per layer, waking a second thread costs more than it saves: with
# batches of 128 and 256 units it breaks even at rank 30.
_FOR_ONE_THREAD = 2**20
_FEWEST = 512  # factors that are worth a partial sum


class ChainLearner(RankLearner):
    was_tried = True  # by `is_chain`

    def __init__(self, net: IncrementalNet, feed: Feed, pad: int = 1) -> None:
        super().__init__(net, feed, pad)
        self.replicas = "stacked"
        self._chain = chain_layers(net)
        self._heads = [layer for layer in net.parts if isinstance(layer, TaskHead)]
        self._names = [f"body.{name}" for name, _ in net.body.named_parameters()]
        # A GPU gathers floats as fast as bytes, so inputs are scaled beforehand if they fit.
        fixed = feed.fixed
        self._is_scaled = (
            fixed is not None
            and fixed.is_cuda
            and feed.dtype.itemsize * fixed.numel() <= MOST_BYTES
        )
        if fixed is not None and self._is_scaled:
            self.x = self._step_inputs["x"] = feed.scaled(feed.floats(fixed)).flatten(1)
        self._scale = None if self._is_scaled else feed.byte_scale
        products = (
            layer.spec.rank.used(layer.place) * layer.out_features * feed.batch_size
            for layer in self._chain
        )
        self.threads = 1 if max(products) <= _FOR_ONE_THREAD else None
        self._links: list[Link] = []

    @contextmanager
    def bound(self, tensors: Tensors) -> Iterator[None]:
        with super().bound(tensors):
            batch = self.feed.batch_size
            # Kept after the tensors are unbound: a captured graph writes to what they hold.
            self._links = [
                Link(self._chain[0], batch, self.projections is not None, self._scale),
                *(Link(layer, batch) for layer in self._chain[1:]),
            ]
            yield

    @torch.no_grad()
    def gradient(self, draw: Draws) -> tuple[Tensor, Sequence[Tensor]]:
        first, (head,) = self._links[0], self._heads
        at = flat_rows(draw["rows"], self.y.shape[-1])
        product: Product = torch.mm if at.dim() == 1 else torch.bmm
        with self.side_stream():
            labels = self.feed.labels(self.y, draw, at).unsqueeze(-2)
            for link in self._links:
                link.gather_factors()
        projected = None if self.projections is None else take_flat(self.projections, at).mT
        x = None if first.V is None else self._batch(draw, at).mT
        self.join()
        for link in self._links:
            x, projected = link.forward(x, projected, product), None
        assert x is not None
        weight = head.new_weight.detach()
        bias = head.new_bias.detach() if head.spec.bias else None
        logits = product(weight, x)
        if bias is not None:
            logits += bias.unsqueeze(-1)
        by_entropy = self.feed.recipe.loss == "cross-entropy"
        loss, grad, read = (self._cross_entropy if by_entropy else self._squares)(logits, labels)
        name = f"body.{head.spec.name}.new_"
        with self.side_stream(1):
            grads = {f"{name}weight": product(grad, x.mT)}
            if bias is not None:
                grads[f"{name}bias"] = grad.sum(-1)
        to_y = product(weight.mT, grad)
        held: list[object] = [read]  # until `join`, for operations on side streams
        for link in reversed(self._links):
            back = self._backward(link, to_y, product, wants_x=link is not first)
            grads |= {f"body.{link.name}.new_{key}": g for key, g in back.grads.items()}
            held.append(back)
            to_y = back.to_x if back.to_x is not None else to_y
        self.join()
        return loss, [grads[name] for name in self._names]

    def _cross_entropy(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, its gradient for the logits (softmax, minus one at the label, divided by the
        batch size), and a tensor that must stay alive until `join`."""
        logs = logits.log_softmax(-2)
        share = 1 / labels.shape[-1]
        with self.side_stream():
            loss = logs.gather(-2, labels).sum((-2, -1)) * _number(-share, logs)
        return loss, _less_one_at(labels, logs.exp()).mul_(_number(share, logs)), logs

    def _squares(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same for the squared error of the softmax, as in the paper's notebook."""
        likely = logits.softmax(-2)
        off = _less_one_at(labels, likely.clone())
        share = 1 / (labels.shape[-1] * logits.shape[-2])
        with self.side_stream():
            loss = off.square().sum((-2, -1)) * _number(share, off)
        to_likely = off * _number(2 * share, off)
        return loss, torch._softmax_backward_data(to_likely, likely, -2, likely.dtype), off

    def _batch(self, draw: Draws, at: Tensor) -> Tensor:
        if self._is_scaled:
            return take_flat(self.x, at)
        if self._scale is not None:
            return take_flat(self.x, at).to(self.feed.dtype).flatten(at.dim())
        return self.feed.batch(self.x, draw, at).flatten(at.dim())

    def _backward(self, link: Link, to_y: Tensor, product: Product, *, wants_x: bool) -> Backward:
        """Gradients for what the layer learns, and for its input if `wants_x`. The other layers
        wait only for the latter, so all else may be computed on side streams."""
        added, grads = link.added, {}
        grad = torch.ops.aten.threshold_backward(to_y, link.y, 0)
        with self.side_stream():
            if added:
                rows = product(link.selected_by_new, grad.mT)
                grads["U"] = rows.narrow(-2, 0, added)
            if link.bias is not None:
                grads["bias"] = rows.select(-2, added) if added else grad.sum(-1)
        to_selected = product(link.U, grad)  # [R, B]
        with self.side_stream(1):
            grads["selector"] = (to_selected * link.hidden).sum(-1)
        if not (wants_x or added):
            return Backward(grads, None, (grad, to_selected))
        # The first layer's input needs no gradient, only its new factors do.
        to_hidden = (
            to_selected * link.selector if wants_x else link.new(to_selected) * link.new_selector
        )
        if added:
            assert link.x is not None
            with self.side_stream(1) if wants_x else nullcontext():
                grads["V"] = link.scaled(product(link.new(to_hidden), link.x.mT))
        to_x = None
        if wants_x:
            assert link.V is not None
            to_x = over_factors(link.V, to_hidden)
        return Backward(grads, to_x, (grad, to_selected, to_hidden))


def chain_layers(net: IncrementalNet) -> list[FactoredLinear]:
    layers = (net.body.get_submodule(name) for name in net.plan.chain or ())
    return [layer for layer in layers if isinstance(layer, FactoredLinear)]


def is_chain(net: IncrementalNet, feed: Feed) -> bool:
    """Whether `ChainLearner` can learn this network's open task from this feed."""
    if feed.recipe.precision == "bfloat16":
        return False
    layers = chain_layers(net)
    return (
        bool(layers)
        and runs_as_traced(net.body, feed)
        and feed.x[0].numel() == layers[0].in_features
        and not any(
            layer.base_weight is not None
            or dense_is_cheaper(
                feed.batch_size,
                layer.spec.rank.used(layer.place),
                layer.in_features,
                layer.out_features,
            )
            for layer in layers
        )
        and _learns_nothing_else(net, layers)
        and _answers_as_chain(net, layers, feed)
    )


def _learns_nothing_else(net: IncrementalNet, layers: Sequence[FactoredLinear]) -> bool:
    """Whether all parameters are the chain's. A module may hold layers that it never runs."""
    heads = (layer for layer in net.parts if isinstance(layer, TaskHead))
    # By name: those of a compiled body differ.
    known = {
        f"{layer.spec.name}.{key}"
        for layer in (*layers, *heads)
        for key, _ in layer.named_parameters()
    }
    return all(name in known for name, _ in net.body.named_parameters())


@torch.no_grad()
def _answers_as_chain(net: IncrementalNet, layers: Sequence[FactoredLinear], feed: Feed) -> bool:
    """Whether the module computes what the chain does. Tried, because parts of the module that are
    not layers, such as a dropout or a scale, may have changed since it was traced."""
    (head,) = (layer for layer in net.parts if isinstance(layer, TaskHead))
    x, _ = next(feed.train(2))
    answer, y = trial(net.body, x, len(net.tasks)), x.flatten(1)
    with active(len(net.tasks)):
        for layer in layers:
            y = layer(y).relu()
        same = head(y)
    return answer.shape == same.shape and torch.allclose(answer, same)


class Link:
    """A layer of the chain: its tensors as steps use them, and what its forward pass leaves for its
    backward pass.

    The bias is one more row of U, whose hidden channel is always 1, so it needs no operations of
    its own. If the task adds no factors, U is frozen and would only be copied for that.

    Args:
        is_projected: whether the data is already projected by the old factors.
        scale: number to multiply the inputs by.
    """

    x: Tensor | None  # [in, B]; None where only its projection is used
    hidden: Tensor  # [R, B]: V x
    y: Tensor  # [out, B], after the ReLU

    def __init__(
        self,
        layer: FactoredLinear,
        batch: int,
        is_projected: bool = False,
        scale: float | None = None,
    ) -> None:
        self.name, self.added = layer.spec.name, layer.spec.rank.added(layer.place)
        self.selector = layer.new_selector.detach().unsqueeze(-1)
        self.bias = layer.new_bias.detach().unsqueeze(-1) if layer.spec.bias else None
        self.U = self._all_U = layer.old_U  # [R, out]
        self.V = None if is_projected else layer.old_V  # [R, in], or just of the new ones
        *leading, rank, _ = self.selector.shape
        rows = rank
        if self.added:
            self._U_parts = [layer.old_U, layer.new_U.detach()]
            if self.bias is not None:
                self._U_parts.append(self.bias.mT)
                rows += 1
            self._all_U = layer.old_U.new_empty(*leading, rows, layer.out_features)
            self.U = self._all_U[..., :rank, :]
            self._V_parts = [layer.old_V, layer.new_V.detach()]
            self.V = layer.new_V.detach()
            if not is_projected:
                self.V = layer.old_V.new_empty(*leading, rank, layer.in_features)
        self.new_selector = self.new(self.selector)
        self._is_projected = is_projected
        self._scale = None if scale is None else _number(scale, layer.old_U)
        self._all_selected = layer.old_U.new_ones(*leading, rows, batch)
        self._selected = self._all_selected[..., :rank, :]  # hidden times the selector
        self.selected_by_new = self._all_selected[..., rank - self.added :, :]

    def new(self, rows: Tensor) -> Tensor:
        """The rows that belong to the new factors."""
        return rows.narrow(-2, rows.shape[-2] - self.added, self.added)

    def scaled(self, product: Tensor) -> Tensor:
        """A product with the inputs, multiplied by their scale."""
        return product if self._scale is None else product.mul_(self._scale)

    def gather_factors(self) -> None:
        """Concatenate the old factors and the current new ones."""
        if self.added:
            torch.cat(self._U_parts, -2, out=self._all_U)
            if not self._is_projected:
                torch.cat(self._V_parts, -2, out=self.V)

    def forward(self, x: Tensor | None, projected: Tensor | None, product: Product) -> Tensor:
        """The layer's outputs; `projected` is the old factors' projection of the inputs."""
        parts = [projected] if projected is not None else []
        if self.V is not None:
            assert x is not None
            parts.append(self.scaled(product(self.V, x)))
        self.x = x
        self.hidden = parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, -2)
        torch.mul(self.hidden, self.selector, out=self._selected)
        self.y = over_factors(self._all_U, self._all_selected)
        if self.bias is not None and not self.added:
            self.y += self.bias
        return self.y.relu_()


class Backward(NamedTuple):
    """The result of a layer's backward pass."""

    grads: Tensors  # by key, for what the layer learns
    to_x: Tensor | None  # the gradient for its input
    held: tuple[Tensor, ...]  # tensors that must stay alive until `join`


def over_factors(left: Tensor, right: Tensor, parts: int | None = None) -> Tensor:
    """`leftᵀ right` for `left [R, m]` and `right [R, n]`, or a stack of each.

    With few outputs and thousands of factors a stack would leave most of a GPU's processors idle,
    so parts of the factors are summed in parallel, then the partial sums.

    >>> U, hidden = torch.rand(2, 8, 3), torch.rand(2, 8, 5)
    >>> torch.allclose(over_factors(U, hidden, parts=4), U.mT @ hidden)
    True
    """
    *stack, rank, m = left.shape
    parts = parts or (_parts(rank) if left.is_cuda and stack else 1)
    if parts == 1:
        return left.mT @ right
    one, other = (t.reshape(-1, rank // parts, t.shape[-1]) for t in (left, right))
    return torch.bmm(one.mT, other).view(*stack, parts, m, -1).sum(-3)


def _parts(rank: int) -> int:
    """A power of two, because tables are padded to a multiple of one.

    >>> _parts(12288), _parts(6016), _parts(768), _parts(12289)
    (16, 8, 1, 1)
    """
    parts = 1
    while rank % (2 * parts) == 0 and rank // (2 * parts) >= _FEWEST:
        parts *= 2
    return parts


def _less_one_at(labels: Tensor, likely: Tensor) -> Tensor:
    return likely.scatter_add_(-2, labels, _number(-1.0, likely).expand(labels.shape))


def _number(value: float, like: Tensor) -> Tensor:
    return _made(value, like.dtype, like.device)


@cache  # so that no step makes it again: that takes torch as long as a small sum
def _made(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)

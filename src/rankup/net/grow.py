"""`grow` turns any module into a network that learns one task after another."""

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import nn

from rankup.errors import RankupError
from rankup.growing.options import GrowOptions, Vectors
from rankup.growing.routing import RouterRule
from rankup.layers.rounding import Store
from rankup.net.network import IncrementalNet
from rankup.rank import RankRule

Patterns = str | Sequence[str]


def grow(
    module: nn.Module,
    rank: RankRule,
    *,
    base: Literal["new", "keep"] = "new",
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    last: int | None = None,
    head: Patterns | None = None,
    seed: int = 0,
    store: Store = "full",
    per_task: Patterns | None = None,
    dtype: torch.dtype | None = None,
    base_dtype: torch.dtype | None = None,
    vectors: Vectors = "per task",
    router: str | None = None,
    copy: bool = True,
) -> IncrementalNet:
    """A network with the module's architecture that learns task after task.

    Linear and convolutional layers become sums of factors; normalisation layers and the head are
    kept per task. The module itself is not modified.

    Args:
        module: any module; parts that cannot be factored are named in the error.
        rank: how many factors a task adds: one rule, or rules by layer name (`{"blocks.*": …}`).
        base: `"new"` discards the module's weights (except for a parameter that none of its
            modules knows how to redraw: that keeps its values); `"keep"` leaves them as a constant
            part of every layer, to which the factors add, for a pretrained module.
        include: name patterns of the layers to factor.
        exclude: name patterns of what not to factor. What is not factored is trained with the
            first task (with `base="keep"` not even then) and constant after it.
        last: factor only this many last layers, not counting the head; what runs before them,
            norms included, is treated like what is not factored.
        head: the name of the output layer, if it is neither what the model itself calls so nor the
            Linear that runs last; several names if they answer together; `"new"` puts one behind a
            module that gives features.
        seed: for everything random in the network.
        store: what a task's numbers are rounded to when it is committed, and stored as: `"full"`
            leaves them as they are, `"float16"` halves the files, `"int8"` quarters them.
        per_task: name patterns of parameters of which each task gets its own, such as
            `"cls_token"`; norms and biases are kept per task anyway.
        dtype: what tasks learn and store, such as `torch.float32` for a module in bfloat16, which
            goes on computing in that; by default the module's own, the widest if it has several.
        base_dtype: what the weights of factored layers are kept in with `base="keep"`, such as
            `torch.bfloat16` for a module in float32, which goes on computing in that: half the
            memory, and nothing to cast where autocast computes in it.
        vectors: whether each task has norms and biases of its own, or with `base="keep"` all have
            the module's: a task then stores little more than its factors and head, and has less
            to learn from few examples. Batch norms then keep the module's statistics, too.
        router: how to guess the task of inputs that come without one: `"energy"`,
            `"mahalanobis"`, `"means"`, `"analytic"` or several with weights, such as
            `"energy, mahalanobis=0.1"`; `"analytic, patches"` for photographs. See
            docs/guessing.md.
        copy: whether the module's weights are copied. Without, for a large module with
            `base="keep"`, the network takes them over: they must not be changed any more.

    >>> import rankup, torch
    >>> net = rankup.grow(rankup.models.mlp(784, hidden=[256, 256]), rankup.Rank(first=11, step=1))
    >>> net.begin_task("digits", classes=10)
    >>> net(torch.zeros(3, 784), task="digits").shape
    torch.Size([3, 10])
    >>> net.commit_task()
    >>> net.size().total
    20176
    """
    heads = head if head is None or isinstance(head, str) else _patterns(head)
    options = GrowOptions(
        rank,
        base,
        _patterns(include),
        _patterns(exclude) or (),
        last,
        heads,
        seed,
        store,
        _patterns(per_task) or (),
        dtype=dtype,  # type: ignore[arg-type]
        base_dtype=base_dtype,  # type: ignore[arg-type]
        vectors=vectors,
        router=None if router is None else RouterRule.parse(router),
    )
    if not copy and base != "keep":
        raise RankupError("copy=False takes over a module's weights, which needs base='keep'")
    net = IncrementalNet(module, options, copy=copy)
    net.plan.warn(net.options)
    return net


def _patterns(given: Patterns | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, Iterable):
        return (given,)
    return tuple(given)

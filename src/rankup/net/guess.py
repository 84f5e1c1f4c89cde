"""Guessing the task of inputs: which task is likeliest, how sure that is, and whether any fits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rankup.errors import RankupError, TaskStateError
from rankup.net.routers.base import RoutedBatch
from rankup.net.routers.routing import LEVELS, Routing

if TYPE_CHECKING:
    from rankup.net.network import IncrementalNet

_FAR = 12.0  # tasks whose log-probability is further below the likeliest one's are not run


class Guess(NamedTuple):
    """The guessed task of each sample. With `together=True`, one guess for the whole batch, without
    the first dimension.

    Attributes:
        task: `[B]`: the index of the likeliest task.
        probabilities: `[B, T]`: of each task, given that it is one of them.
        none: `[B]`: the share of that task's held-out samples that fit it better. To take an input
            above 0.95 for one of no known task is wrong for one in twenty.
        strangeness: `[B]`: how badly an input fits, to rank inputs that fit worse than all held-out
            samples.
    """

    task: Tensor
    probabilities: Tensor
    none: Tensor
    strangeness: Tensor


class Untold(NamedTuple):
    """An answer without being told the task.

    Attributes:
        logits: `[B, ΣC]`: for every class of every task, in the tasks' order, the logarithm of its
            probability; −∞ for those of tasks that were not asked.
        task: `[B]`: the index of the likeliest task.
    """

    logits: Tensor
    task: Tensor


class Drift(NamedTuple):
    """Whether inputs look like no known task.

    Attributes:
        strange: the share of them that fits their task worse than nearly all held-out samples do.
        expected: what this share is for inputs of known tasks.
        is_new: whether it is more than twice that, by three standard errors.
    """

    strange: float
    expected: float
    is_new: bool

    def __str__(self) -> str:
        if not self.is_new:
            return f"{self.strange:.1%} look strange, as inputs of known tasks may"
        return (
            f"{self.strange:.1%} of these inputs look like no known task, where "
            f"{self.expected:.1%} are to be expected: learn a new one?"
        )


def drift(found: Guess, false_alarms: float) -> Drift:
    if not 0 < false_alarms < 0.5:
        raise RankupError(f"false_alarms must be a share between 0 and 0.5, got {false_alarms}")
    count, most = found.none.numel(), 2 * false_alarms
    strange = float((found.none > 1 - false_alarms).float().mean())
    error = math.sqrt(most * (1 - most) / count)
    return Drift(strange, false_alarms, strange > most + 3 * error)


class Routed(NamedTuple):
    """A batch and what routers say of it."""

    votes: Tensor  # [B, T]: log-probabilities up to a constant; −∞ for tasks that were ruled out
    batch: RoutedBatch


@torch.no_grad()
def guess(
    net: IncrementalNet, x: Tensor, options: dict[str, Any], likeliest: int | None, together: bool
) -> Guess:
    routing = routing_of(net, x)
    return _guess(routing, route(net, routing, x, options, likeliest, together), together)


@torch.no_grad()
def answer(
    net: IncrementalNet, x: Tensor, options: dict[str, Any], likeliest: int | None
) -> Untold:
    """The log-probability of each class: its task's plus its own within the task, for which routers
    that tell classes apart vote, too."""
    routing = routing_of(net, x)
    return _answer(routing, route(net, routing, x, options, likeliest))


@torch.no_grad()
def guess_and_answer(net: IncrementalNet, x: Tensor) -> tuple[Guess, Untold]:
    """Both from one look at the inputs."""
    routing = routing_of(net, x)
    routed = route(net, routing, x, {}, None)
    return _guess(routing, routed, together=False), _answer(routing, routed)


def _guess(routing: Routing, routed: Routed, together: bool) -> Guess:
    votes, batch = routed
    shares = votes.sum(0, keepdim=True) if together else votes
    task = shares.argmax(1)
    fits = _fits(routing, batch, task.expand(len(votes)))
    fits = fits.mean(0, keepdim=True) if together else fits
    quantiles = routing.quantiles(votes.device)[task]  # [B, levels]
    above = torch.searchsorted(quantiles, fits[:, None])[:, 0]
    found = Guess(task, shares.softmax(1), 1 - above / LEVELS, -fits)
    return Guess(*(tensor[0] for tensor in found)) if together else found


def _answer(routing: Routing, routed: Routed) -> Untold:
    votes, batch = routed
    votes = votes.masked_fill(votes < votes.amax(1, keepdim=True) - _FAR, -torch.inf)
    shares = votes.log_softmax(1)
    batch.narrow_to(votes)
    parts = []
    for task in range(votes.shape[1]):
        logits = batch.of(task).logits.float().log_softmax(1)
        for name, weight in routing.rule.weights:
            if (classes := routing.routers[name].class_votes(batch, task)) is not None:
                logits = (logits + weight * classes).log_softmax(1)
        parts.append(logits + shares[:, task, None])  # −∞ where the task was ruled out
    return Untold(torch.cat(parts, 1), votes.argmax(1))


def routing_of(net: IncrementalNet, x: Any) -> Routing:
    """The network's routing, if it can guess the task of `x`; otherwise raise."""
    routing = net.routing
    if routing is None:
        raise RankupError(
            "this network cannot guess a task: name one, as in net(x, task=…), or grow it with "
            "router='energy' or another before its first task"
        )
    if not routing.rows:
        raise TaskStateError("there is no task to guess: the network has learned none yet")
    if not isinstance(x, Tensor) or not x.dim() or not len(x):
        what = f"a tensor of shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise RankupError(f"tasks are guessed for a tensor of samples, got {what}")
    return routing


def route(
    net: IncrementalNet,
    routing: Routing,
    x: Tensor,
    options: dict[str, Any],
    likeliest: int | None,
    together: bool = False,
) -> Routed:
    """Let routers vote: first those that do not run the network for every task, then, for the
    tasks that are still candidates, the others.

    Args:
        likeliest: how many candidates the first routers leave for each sample; None for all.
        together: whether all samples have the same task.
    """
    batch, tasks = RoutedBatch(net, routing, x, options), range(len(routing.rows))
    cheap = [name for name in routing.rule.names if not routing.routers[name].runs_tasks]
    weights = dict(routing.rule.weights)
    votes = torch.zeros(len(x), len(tasks), device=x.device)
    for name in cheap:
        votes = votes + weights[name] * _votes(routing, batch, name)
    if likeliest is not None:
        votes = _narrowed(votes, likeliest, bool(cheap), together)
    batch.narrow_to(votes)
    for name in (name for name in weights if name not in cheap):
        votes = votes + weights[name] * _votes(routing, batch, name)
    return Routed(votes, batch)


def _votes(routing: Routing, batch: RoutedBatch, name: str) -> Tensor:
    return routing.routers[name].votes(batch, routing.fits(batch, name))


def _narrowed(votes: Tensor, likeliest: int, has_cheap: bool, together: bool) -> Tensor:
    if not has_cheap:
        raise RankupError(
            "likeliest needs a router that finds tasks without running the network for each: means "
            "or analytic"
        )
    if likeliest < 1:
        raise RankupError(f"likeliest must be at least 1, got {likeliest}")
    if likeliest >= votes.shape[1]:
        return votes
    by = votes.sum(0, keepdim=True).expand_as(votes) if together else votes
    kept = by.topk(likeliest, 1).indices
    return torch.full_like(votes, -torch.inf).scatter_(1, kept, votes.gather(1, kept))


def _fits(routing: Routing, batch: RoutedBatch, tasks: Tensor) -> Tensor:
    """`[B]`: how well each sample fits the task that was guessed for it."""
    total = torch.zeros(len(tasks), device=tasks.device)
    for name, weight in routing.rule.weights:
        own = routing.fits(batch, name).gather(1, tasks[:, None])[:, 0]
        total = total + weight * own
    return total

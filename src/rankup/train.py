"""Learning one task: the data on its device, the loop over steps, and what to do when it fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankup import seeds
from rankup.data.transforms import Augmentation, Permutation, augment, draw_augmentation, to_float
from rankup.errors import RankupError
from rankup.layers.factored import FactoredLinear, projected
from rankup.network import IncrementalNet
from rankup.optimiser import FlatAdam, rate
from rankup.recipe import Recipe

if TYPE_CHECKING:
    from rankup.data.tasks import Task

_CHUNK = 2048  # samples in a batch that is only looked at
_PROBE = 1000  # training samples behind the accuracy that progress shows
_MOST_PROJECTED = 2**31  # bytes that projections of a task's inputs may take
_WITNESS = 10_000  # training samples behind the verdict that a task was learned


class TaskFailed(RankupError):
    """A task could not be learned; the network is as it was before."""


@dataclass(frozen=True)
class Epoch:
    """How far a task is, after each pass over its data."""

    number: int  # epochs done
    epochs: int
    loss: float
    accuracy: float  # on a sample of the training data


@dataclass(frozen=True)
class Checkpoint:
    """All it takes to go on after an epoch."""

    epoch: int
    state: dict[str, Tensor]


OnEpoch = Callable[[Epoch, Checkpoint], None]


class Feed:
    """A task's data on its device, and its batches as a recipe wants them."""

    def __init__(self, task: Task, recipe: Recipe, device: torch.device) -> None:
        self.task = task.to(device)
        self.recipe = recipe
        self.device = device

    def __len__(self) -> int:
        return len(self.task.train_y)

    @cached_property
    def made(self) -> Tensor | None:
        """Training data that is the same in every epoch, ready but for its scale. Bytes stay bytes
        where that loses nothing: gathering a quarter of the memory takes half the time."""
        x, transform = self.task.train_x, self.task.transform
        if self.recipe.augments:
            return None
        if transform is None:
            return x
        if isinstance(transform, Permutation):
            return torch.cat([transform(part) for part in torch.split(x, _CHUNK)])
        return torch.cat([transform(to_float(part)) for part in torch.split(x, _CHUNK)])

    def batch(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """Training inputs, augmented where the recipe says so."""
        if self.made is not None:
            return self.scaled(to_float(self.made.index_select(0, rows)))
        x = to_float(self.task.train_x.index_select(0, rows))
        drawn = draw_augmentation(len(rows), self.recipe.crop, generator)
        coins = drawn.coins if self.recipe.flip else torch.zeros_like(drawn.coins)
        chosen = Augmentation(coins.to(self.device), drawn.offsets.to(self.device))
        x = augment(x, self.recipe.crop, chosen)
        return self.scaled(x if self.task.transform is None else self.task.transform(x))

    def train(self, most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Training data as it is, in chunks; of more than `most` samples every second, third, …,
        because data may come sorted by class."""
        every = math.ceil(len(self) / most)
        return self._chunks(self.task.train_x[::every], self.task.train_y[::every])

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._chunks(self.task.test_x, self.task.test_y)

    def sample(self, most: int, draw: torch.Generator) -> Iterator[Tensor]:
        """Batches of shuffled training inputs, not augmented."""
        rows = torch.randperm(len(self), generator=draw)[:most].to(self.device)
        for part in torch.split(rows, _CHUNK):
            yield self._inputs(self.task.train_x.index_select(0, part))

    def _chunks(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for chunk, labels in zip(torch.split(x, _CHUNK), torch.split(y, _CHUNK), strict=True):
            yield self._inputs(chunk), labels

    def _inputs(self, x: Tensor) -> Tensor:
        x = to_float(x)
        return self.scaled(x if self.task.transform is None else self.task.transform(x))

    def scaled(self, x: Tensor) -> Tensor:
        if self.recipe.pixels == "raw":
            return x * 255
        return x * 2 - 1 if self.recipe.pixels == "centred" else x


def accuracy(predict: Callable[[Tensor], Tensor], chunks: Iterator[tuple[Tensor, Tensor]]) -> float:
    """The share of samples whose largest logit is their label's."""
    right, seen = 0, 0
    with torch.no_grad():
        for x, y in chunks:
            right += int((predict(x).argmax(1) == y).sum())
            seen += len(y)
    return right / seen


def loss_of(recipe: Recipe, logits: Tensor, labels: Tensor) -> Tensor:
    if recipe.loss == "cross-entropy":
        return F.cross_entropy(logits, labels)
    wanted = F.one_hot(labels, logits.shape[1]).to(logits.dtype)
    return F.mse_loss(logits.softmax(1), wanted)


def learn(
    train_logits: Callable[[Tensor, torch.Generator], Tensor],
    predict: Callable[[Tensor], Tensor],
    parameters: Sequence[nn.Parameter],
    feed: Feed,
    recipe: Recipe,
    *,
    index: int,
    seed: int,
    buffers: Mapping[str, Tensor] | None = None,
    resume: Checkpoint | None = None,
    on_epoch: OnEpoch | None = None,
) -> None:
    """Train `parameters` until `train_logits` of training rows give their labels.

    Whatever is random in an epoch comes from the seed, the task's index and the epoch's number, so
    an interrupted run goes on from a checkpoint as if nothing had happened. `predict` is for
    inputs that are only looked at; `buffers` is what else a step changes.
    """
    optimiser = FlatAdam(parameters, recipe.weight_decay)
    state = optimiser.state() | {f"buffer/{key}": t for key, t in (buffers or {}).items()}
    if resume is not None:
        for name, tensor in state.items():
            tensor.copy_(resume.state[name])
    peak = recipe.first_lr if index == 0 and recipe.first_lr else recipe.lr
    per_epoch = math.ceil(len(feed) / recipe.batch)
    steps = recipe.epochs * per_epoch
    labels = feed.task.train_y
    for epoch in range(resume.epoch if resume else 0, recipe.epochs):
        draw = seeds.generator(seed, "epoch", index, epoch)
        order = torch.randperm(len(feed), generator=draw).to(feed.device)
        total = torch.zeros((), device=feed.device)
        for number, rows in enumerate(torch.split(order, recipe.batch), epoch * per_epoch):
            loss = loss_of(recipe, train_logits(rows, draw), labels.index_select(0, rows))
            optimiser.step(loss, number, rate(recipe, peak, number, steps))
            total += loss.detach()
        mean = float(total) / per_epoch
        if not math.isfinite(mean):
            raise TaskFailed(
                f"task {feed.task.name!r} diverged: the loss of epoch {epoch + 1} is {mean}; a "
                f"learning rate below {peak:g} may help"
            )
        if on_epoch is not None:
            shown = accuracy(predict, feed.train(_PROBE))
            on_epoch(Epoch(epoch + 1, recipe.epochs, mean, shown), Checkpoint(epoch + 1, state))


def check_learned(predict: Callable[[Tensor], Tensor], feed: Feed) -> None:
    """Raise where a task's accuracy on its own training data is no better than guessing."""
    reached = accuracy(predict, feed.train(_WITNESS))
    labels = feed.task.train_y
    # Guessing well means to name the most frequent class.
    guess = float(labels.bincount().max()) / len(labels)
    error = math.sqrt(guess * (1 - guess) / min(len(labels), _WITNESS))
    # A handful of samples cannot be three errors away, but all of them can be right.
    if reached <= guess + 3 * error and reached < 1:
        raise TaskFailed(
            f"task {feed.task.name!r} was not learned: {reached:.1%} on its own training data is "
            f"within three standard errors of guessing ({guess:.1%}); another learning rate or "
            "more epochs may help"
        )


def fit(
    net: IncrementalNet,
    task: Task,
    recipe: Recipe | None = None,
    *,
    seed: int | None = None,
    resume: Checkpoint | None = None,
    on_epoch: OnEpoch | None = None,
) -> IncrementalNet:
    """Begin a task, learn it, calibrate and commit; give back the network.

    >>> import rankup
    >>> net = rankup.grow(rankup.models.mlp(64, hidden=[32]), rankup.Rank(first=4, step=1))
    >>> for task in rankup.data.make_stream("s-digits"):
    ...     net = rankup.fit(net, task, rankup.Recipe(epochs=5))
    >>> net.tasks
    ['split 01', 'split 02', 'split 03', 'split 04', 'split 05']

    Where the loss does not stay finite, or the task ends no better than guessing, the task is
    abandoned and `TaskFailed` says why; all earlier tasks are kept. The same happens to the task
    when something else goes wrong, as with Ctrl-C.
    """
    recipe = recipe or Recipe()
    index, mode = len(net.tasks), net.training

    def predict(x: Tensor) -> Tensor:
        net.eval()
        answer: Tensor = net(x, index)
        net.train()
        return answer

    net.begin_task(task.name, task.classes, selectors=recipe.selector_start(), norms=recipe.norms)
    try:
        net.train()
        feed = Feed(task, recipe, net.device)
        learn(
            _train_logits(net, feed),
            predict,
            list(net.parameters()),
            feed,
            recipe,
            index=index,
            seed=net.growth.seed if seed is None else seed,
            resume=resume,
            on_epoch=on_epoch,
        )
        check_learned(predict, feed)
        draw = seeds.generator(net.growth.seed, "calibrate", index)
        net.commit_task(calibrate=feed.sample(_WITNESS, draw))
    except BaseException:
        if net.learning is not None:
            net.abandon_task()
        raise
    finally:
        net.train(mode)
    return net


def _train_logits(net: IncrementalNet, feed: Feed) -> Callable[[Tensor, torch.Generator], Tensor]:
    """The network's answer for rows of the training data.

    Where its first layer reads inputs that never change, what the frozen factors see of them is
    computed once and not at every step.
    """
    index, made = len(net.tasks), feed.made
    layer = net.body.get_submodule(net.plan.first) if net.plan.first is not None else None
    if (
        not isinstance(layer, FactoredLinear)
        or layer.base_weight is not None
        or made is None
        or made[0].numel() != layer.in_features
        or not 0 < 4 * len(layer.U) * len(feed) <= _MOST_PROJECTED
    ):
        return lambda rows, draw: net(feed.batch(rows, draw), index)
    with torch.no_grad():
        parts = (feed.scaled(to_float(part)) for part in torch.split(made, _CHUNK))
        seen = torch.cat([layer.project(part.flatten(1)) for part in parts])
    learns_factors = layer.spec.rank.added(index) > 0
    unread = to_float(made[:1])

    def logits(rows: Tensor, draw: torch.Generator) -> Tensor:
        # Without factors of its own, the layer looks at nothing but the projection.
        x = feed.batch(rows, draw) if learns_factors else unread.expand(len(rows), *made.shape[1:])
        with projected(layer, seen.index_select(0, rows)):
            answer: Tensor = net(x, index)
        return answer

    return logits

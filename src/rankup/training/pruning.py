"""Pruning: of the numbers that a task has learned, as few are kept as its accuracy and loss on
held-out data allow.

Selectors may be dropped, and with them the task's own factors, as well as biases and the weights of
heads. They are ranked by how much the loss would grow without them, per byte that they take: the
square of a number times the sum of its squared gradients, as for a quadratic loss. How many of the
best are kept is found by bisection: the others are dropped, the task learns for an epoch with what
is left, and is tested.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rankup import seeds
from rankup.data.heldout import hold_out
from rankup.data.streams import Stream
from rankup.errors import RankupError
from rankup.layers import TaskLayer, Tensors, pruned, rounding
from rankup.training.engine.eager import Eager
from rankup.training.engine.module import losses_of
from rankup.training.engine.rank import RankLearner
from rankup.training.engine.select import Engine
from rankup.training.loop import OpenTask, train
from rankup.training.optim import flattened, views

if TYPE_CHECKING:
    from rankup.data.tasks import Task
    from rankup.training.fit import NetPupil

_SHARE = 0.1  # of a task's training samples that are held out
_MOST = 5_000  # samples held out
_LEAST = 20  # of fewer, a standard error says little
_HALVINGS = 5  # steps of the bisection, each of which takes an epoch
_RATE = 0.3  # share of the recipe's learning rate, because the task is learned already
_STEPS = 100  # whose gradients are summed


def with_held_out(task: Task, seed: int) -> Task:
    """A task with a part of its training data in place of its test data."""
    count = len(task.train_y)
    if count * _SHARE < _LEAST:
        raise RankupError(
            f"task {task.name!r} has {count} training samples, but a network that drops factors "
            f"tests on {_SHARE:.0%} of them and needs at least {math.ceil(_LEAST / _SHARE)}"
        )
    share = min(_SHARE, _MOST / count)
    return hold_out(Stream(task.name, (task,)), share, seed)[0]


@dataclass(frozen=True)
class Score:
    """How well a task answers its held-out samples.

    >>> before = Score(0.9, loss=0.5, deviation=1.0, samples=100)
    >>> [Score(right, loss, 1.0, 100).is_within(before, 1) for right, loss in ((0.88, 0.55),
    ...     (0.86, 0.5), (0.9, 0.7))]
    [True, False, False]
    """

    accuracy: float
    loss: float  # the mean over samples
    deviation: float  # of samples' losses
    samples: int

    def is_within(self, before: Score, tolerance: float) -> bool:
        """Whether accuracy and loss are no more than that many standard errors worse than before.
        Of few samples the loss tells more than the number of right answers."""
        size, right = tolerance / math.sqrt(before.samples), before.accuracy
        lowest = right - size * math.sqrt(right * (1 - right))
        return self.accuracy >= lowest and self.loss <= before.loss + size * before.deviation


class Pruning:
    """Prunes the open task of a pupil once it is learned.

    Args:
        learner: the task's learner, whose feed has held-out samples as test data.
        engine: runs the steps.
    """

    def __init__(self, pupil: NetPupil, learner: RankLearner, engine: Engine) -> None:
        self.pupil, self.learner, self.engine = pupil, learner, engine
        # The layer and key of each prunable parameter, by its name in the learner.
        self._layers = {
            f"body.{name}.new_{key}": (layer, key)
            for name, layer in pupil.net.body.named_modules()
            if isinstance(layer, TaskLayer)
            for key in pruned.keys_of(layer.spec)
        }

    def run(self, tolerance: float) -> None:
        """Keep the fewest numbers with which the task is no more than `tolerance` standard errors
        worse than before."""
        before = self.score()
        least, most, best = 0, self.count(), self._learned()
        for number in range(_HALVINGS):
            if least >= most:
                break
            middle = (least + most) // 2
            self.drop(middle, number)
            self.learn_on(number)
            if self.score().is_within(before, tolerance):
                most, best = self.count(), self._learned()
            else:
                least = middle + 1
                self.learner.adopt(_copies(best))

    @torch.no_grad()
    def score(self) -> Score:
        """The task's score on the held-out samples."""
        net, feed = self.pupil.net, self.learner.feed
        right, losses = [], []
        for x, y in feed.test():
            logits = self.pupil.predict(x, len(net.tasks))
            right.append(logits.argmax(1) == y)
            losses.append(losses_of(feed.recipe, logits, y))
        is_right, each = torch.cat(right).double(), torch.cat(losses).double()
        numbers = float(is_right.mean()), float(each.mean()), float(each.std()), len(each)
        return Score(*(net.ranks.of_first(numbers) if net.ranks else numbers))

    def count(self) -> int:
        """How many prunable numbers are not zero."""
        return sum(int((tensor != 0).sum()) for tensor in self._numbers().values())

    def drop(self, count: int, number: int) -> None:
        """Set all prunable numbers but the best `count` to zero."""
        gains = self._gains(number)
        together = torch.cat([gain.flatten() for gain in gains.values()])
        is_kept = torch.zeros_like(together, dtype=torch.bool)
        is_kept[together.argsort(descending=True, stable=True)[:count]] = True
        masks = torch.split(is_kept, [gain.numel() for gain in gains.values()])
        for tensor, mask in zip(self._numbers().values(), masks, strict=True):
            tensor.masked_fill_(~mask.view_as(tensor), 0)

    def learn_on(self, number: int) -> None:
        """Learn for an epoch with the numbers that are left."""
        learner, whole = self.learner, self.learner.feed
        again = copy.copy(self.pupil)
        lr, first_lr = (_RATE * rate for rate in (again.recipe.lr, again.recipe.first_lr))
        again.recipe = replace(again.recipe, epochs=1, lr=lr, first_lr=first_lr)
        again.seed = seeds.number(again.seed, "pruning", again.draws_by, number)
        learner.feed = copy.copy(whole)
        learner.feed.recipe = again.recipe
        learner.mask({name: tensor != 0 for name, tensor in self._numbers().items()})
        try:
            train([OpenTask(again, learner)], self.engine.start([learner]))
        finally:
            learner.feed = whole

    def _gains(self, number: int) -> Tensors:
        """By how much the loss would grow without each number, per byte that it takes."""
        store, squares = self.pupil.net.options.store, self._squares(number)
        return {
            name: squares[name] * tensor.square() / _bytes_of(*self._layers[name], store)
            for name, tensor in self._numbers().items()
        }

    def _squares(self, number: int) -> Tensors:
        """Each number's squared gradients, summed over the first steps of an epoch."""
        learner, pupil, feed = self.learner, self.pupil, self.learner.feed
        seed = seeds.number(pupil.seed, "gradients", pupil.draws_by, number)
        draws = learner.sample_epoch(seeds.epoch_generator(seed, pupil.draws_by, 0, feed.device))
        (tensors,) = Eager([learner]).tensors
        total = torch.zeros((), device=feed.device)
        seed += feed.ranks.rank if feed.ranks else 0
        with learner.bound(tensors), seeds.seeded_rng(feed.device, seed):
            for step in range(min(_STEPS, len(draws["rows"]))):
                _, gradients = learner.gradient({key: t[step] for key, t in draws.items()})
                gradient = flattened(gradients, 0)
                if feed.ranks:
                    feed.ranks.average_(gradient, feed.share)
                total = total + gradient.square()
                learner.sync_buffers(tensors)
        return learner.padding.unpad(views(total, learner.learned()))

    def _numbers(self) -> Tensors:
        learned = dict(self.pupil.net.body.named_parameters(prefix="body"))
        return {name: learned[name].detach() for name in self._layers}

    def _learned(self) -> Tensors:
        return _copies(self.learner.learned())


def _copies(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _bytes_of(layer: TaskLayer, key: str, store: rounding.Store) -> Tensor:
    """How many bytes each number of a tensor takes. A selector over one of the task's own factors
    takes those of the factor, too."""
    values = layer.learned()
    spec, own = layer.spec, len(values.get("U", ()))
    sizes = {k: rounding.bytes_of_each(spec, k, v, store) for k, v in values.items()}
    taken = torch.full_like(values[key], sizes[key])
    if key == "selector" and own:
        taken[-own:] += sum(sizes[k] * values[k][0].numel() for k in pruned.OWN)
    return taken

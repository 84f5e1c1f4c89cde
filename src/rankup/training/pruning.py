"""Capacity by itself: of the factors that a task has learned with, the fewest are kept with which
its accuracy on held-out data stays the same.

Factors of all layers are compared by their part in their layer's weight, the length of
`selector · u vᵀ` over that of W. How many of the largest are kept is found by bisection: each time
the others are dropped, the task learns an epoch with what is left, and is tested.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rankup import seeds
from rankup.data.heldout import hold_out
from rankup.data.streams import Stream
from rankup.errors import RankupError
from rankup.layers import LEARNING, FactoredLayer, Tensors, pruned
from rankup.training.engine.rank import RankLearner
from rankup.training.engine.select import Engine
from rankup.training.evaluate import fraction_correct
from rankup.training.loop import OpenTask, train

if TYPE_CHECKING:
    from rankup.data.tasks import Task
    from rankup.training.fit import NetPupil

_SHARE = 0.1  # of a task's training samples that are held out
_MOST = 5_000  # samples held out
_LEAST = 20  # of fewer, a standard error says little
_HALVINGS = 5  # of the range in which the number of factors lies, each of which costs an epoch


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


def lowest_accuracy(full: float, samples: int, tolerance: float) -> float:
    """What an accuracy on that many samples may fall to by so many of its standard errors.

    >>> round(lowest_accuracy(0.9, samples=100, tolerance=1), 6)
    0.87
    """
    return full - tolerance * math.sqrt(full * (1 - full) / samples)


class Pruning:
    """Drops factors of the task that a pupil has learned and not yet committed.

    Args:
        learner: the task's; its feed has held-out samples for test data.
        engine: runs the steps.
    """

    def __init__(self, pupil: NetPupil, learner: RankLearner, engine: Engine) -> None:
        self.pupil, self.learner, self.engine = pupil, learner, engine
        self._layers = [
            layer
            for layer in pupil.net.layers
            if isinstance(layer, FactoredLayer) and pruned.prunes(layer.spec)
        ]

    def run(self, tolerance: float) -> None:
        """Keep the fewest factors with which the task loses no more than that many standard errors
        of its accuracy; what it has learned with these stays."""
        samples = len(self.learner.feed.task.test_y)
        lowest = lowest_accuracy(self.accuracy(), samples, tolerance)
        least, most, best = 0, self.count(), self._learned()
        for number in range(_HALVINGS):
            if least >= most:
                break
            middle = (least + most) // 2
            self.drop(middle)
            self.learn_on(number)
            if self.accuracy() >= lowest:
                most, best = self.count(), self._learned()
            else:
                least = middle + 1
                self.learner.adopt(_copies(best))

    def accuracy(self) -> float:
        """On the held-out samples."""
        net, feed = self.pupil.net, self.learner.feed
        index = len(net.tasks)
        found = fraction_correct(lambda x: self.pupil.predict(x, index), feed.test())
        return net.ranks.of_first(found) if net.ranks else found

    def count(self) -> int:
        """How many factors the task has now."""
        return sum(int((layer.new_selector != 0).sum()) for layer in self._layers)

    @torch.no_grad()
    def drop(self, count: int) -> None:
        """Set the selectors of all factors but that many to zero."""
        parts = [_parts(layer) for layer in self._layers]
        together = torch.cat(parts)
        is_kept = torch.zeros_like(together, dtype=torch.bool)
        is_kept[together.argsort(descending=True, stable=True)[:count]] = True
        masks = torch.split(is_kept, [len(part) for part in parts])
        for layer, mask in zip(self._layers, masks, strict=True):
            layer.new_selector.masked_fill_(~mask, 0)

    def learn_on(self, number: int) -> None:
        """Learn an epoch as the recipe says, with the factors that are left."""
        learner, whole = self.learner, self.learner.feed
        again = copy.copy(self.pupil)
        again.recipe = replace(again.recipe, epochs=1)
        again.seed = seeds.number(again.seed, "pruning", again.draws_by, number)
        learner.feed = copy.copy(whole)
        learner.feed.recipe = again.recipe
        learner.keep({layer.spec.name: layer.new_selector != 0 for layer in self._layers})
        try:
            train([OpenTask(again, learner)], self.engine.start([learner]))
        finally:
            learner.feed = whole

    def _learned(self) -> Tensors:
        return _copies(self.learner.learned())


def _copies(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _parts(layer: FactoredLayer) -> Tensor:
    """The part of each factor in the layer's weight: zero for those that were dropped."""
    lengths = [_lengths(layer.old_U) * _lengths(layer.old_V)]
    if "new_U" in layer._parameters:
        lengths.append(_lengths(layer.new_U) * _lengths(layer.new_V))
    whole = layer.matrix(LEARNING).square().sum().sqrt()
    # Where W is zero, no factor has a part in it.
    return (layer.new_selector.abs() * torch.cat(lengths) / whole).nan_to_num(0)


def _lengths(rows: Tensor) -> Tensor:
    return rows.square().sum(1).sqrt()

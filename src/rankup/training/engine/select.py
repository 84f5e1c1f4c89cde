"""The choice between eager steps and a CUDA graph, for one learner or for several."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence

import torch

from rankup.errors import RankupError
from rankup.layers import Tensors
from rankup.training.engine.cuda_graph import Graph
from rankup.training.engine.eager import Eager, Steps
from rankup.training.engine.learner import Form, Learner


class Engine:
    """Chooses by a fixed rule how steps run, and keeps a captured graph for later tasks.

    Args:
        note: called with a sentence if steps have to run in a slower way.
        alike: whether learners differ only in their seeds. Otherwise they share a graph, but no
            operations in it.
        compiles: whether steps are compiled before they are captured; by default if that saves
            time for this task and network.
    """

    def __init__(
        self,
        note: Callable[[str], None] = warnings.warn,
        alike: bool = True,
        compiles: bool | None = None,
    ) -> None:
        self.note, self.alike, self.compiles = note, alike, compiles
        self._graph: Graph | None = None
        self._refused: set[Form] = set()  # could not be captured

    def start(self, learners: Sequence[Learner]) -> Steps:
        form = self._form(learners)
        if form in self._refused:
            form = "branches"
        if form is None or form in self._refused:
            return Eager(learners)
        signature = form, *(_signature(learner) for learner in learners)
        if self._graph is None or self._graph.signature != signature:
            self._graph = None  # first, so that its memory is free
            try:
                self._graph = self._compiled(form, learners, signature) or Graph(
                    form, learners, signature
                )
            except (RankupError, torch.OutOfMemoryError):
                raise
            except RuntimeError as error:
                self._refused.add(form)
                next_best = "one by one" if form == "branches" else "side by side"
                reason = str(error).strip().splitlines()[0]
                self.note(f"steps are taken {next_best}, as they cannot be captured: {reason}")
                return self.start(learners)
        self._graph.start(learners)
        return self._graph

    def _compiled(
        self, form: Form, learners: Sequence[Learner], signature: Hashable
    ) -> Graph | None:
        """A graph of compiled steps, if there is a single learner that gains by compiling."""
        if form != "branches" or len(learners) > 1 or self.compiles is False:
            return None
        (learner,) = learners
        if not (learner.gains_by_compiling if self.compiles is None else self.compiles):
            return None
        try:
            return Graph(form, learners, signature, compiled=True)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the compiler, or of what it runs
            learner.is_compiled, self.compiles = False, False
            reason = str(error).strip().splitlines()[0]
            self.note(f"steps are captured without being compiled: {reason}")
            return None

    def _form(self, learners: Sequence[Learner]) -> Form | None:
        """The form of a graph for these learners; None for eager steps."""
        if learners[0].feed.device.type != "cuda" or learners[0].feed.ranks:
            return None
        if len({_shapes(learner.learned()) for learner in learners}) > 1:
            self.note("seeds are trained one by one because what they learn differs in shape")
            return None
        if len({learner.feed.recipe.precision for learner in learners}) > 1:
            self.note("runs are trained one by one because they multiply in different precisions")
            return None
        # One learner can take the steps of all if they differ only in the values of tensors.
        alike = (
            self.alike
            and len({_shapes(learner.step_inputs()) for learner in learners}) == 1
            and not any(learner.feed.transforms_batches for learner in learners)
        )
        return learners[0].replicas if len(learners) > 1 and alike else "branches"


def _shapes(tensors: Tensors) -> Hashable:
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())


def _signature(learner: Learner) -> Hashable:
    feed, shapes = learner.feed, (_shapes(learner.step_inputs()), _shapes(learner.learned()))
    return learner.key(), shapes, feed.recipe, feed.steps_per_epoch, feed.batch_size

"""Steps of one task, and the eager way to run them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from rankup import seeds
from rankup.layers import Tensors
from rankup.training.batches import Draws
from rankup.training.engine.learner import Learner
from rankup.training.optim import flattened, make_optimiser, views
from rankup.training.recipe import Recipe


class Steps(ABC):
    """The steps of one task, for one or for several learners."""

    learners: Sequence[Learner]
    tensors: Sequence[Tensors]  # each learner's tensors, as its steps know them

    def on_epoch_start(self, epoch: int) -> None:
        """Let every learner do what it does before an epoch."""
        for learner, tensors in zip(self.learners, self.tensors, strict=True):
            if type(learner).on_epoch_start is Learner.on_epoch_start:
                continue  # binding takes longer than doing nothing
            with learner.bound(tensors), torch.no_grad():
                learner.on_epoch_start(epoch)

    @abstractmethod
    def epoch(self, draws: Sequence[Draws], rates: Sequence[Sequence[float]], seed: int) -> Tensor:
        """Take the steps of an epoch, with a rate for each learner and step; return each
        learner's losses, summed. The seed is for what a module draws by itself, such as dropout."""

    @abstractmethod
    def state(self, number: int) -> Tensors:
        """What one learner needs to resume from here."""

    @abstractmethod
    def adopt(self) -> None:
        """Hand to every learner what it has learned so far."""

    def resume(self, number: int, state: Tensors) -> None:
        for name, tensor in self.state(number).items():
            tensor.copy_(state[name])


class Eager(Steps):
    """Step after step, learner after learner."""

    def __init__(self, learners: Sequence[Learner]) -> None:
        self.learners = learners
        self.tensors, self.optimisers = [], []
        for learner in learners:
            learned = learner.learned()
            flat = flattened((tensor.detach() for tensor in learned.values()), 0)
            self.tensors.append(learner.step_inputs() | views(flat, learned))
            self.optimisers.append(make_optimiser(learner.feed.recipe, flat))

    def epoch(self, draws: Sequence[Draws], rates: Sequence[Sequence[float]], seed: int) -> Tensor:
        with seeds.drawing(self.learners[0].feed.device, seed):
            return torch.stack([self._one(n, d, rates[n]) for n, d in enumerate(draws)])

    def _one(self, number: int, drawn: Draws, rates: Sequence[float]) -> Tensor:
        learner, optimiser = self.learners[number], self.optimisers[number]
        total = torch.zeros((), device=learner.feed.device, dtype=torch.float32)
        with (
            learner.bound(self.tensors[number]),
            precise(learner.feed.recipe),
            at_most(learner.threads),
        ):
            names, entries = list(drawn), (drawn[name].unbind() for name in drawn)
            for lr, *own in zip(rates, *entries, strict=True):
                draw = dict(zip(names, own, strict=True))
                loss, grads = learner.gradient(draw)
                optimiser.step(flattened(grads, 0), lr)
                learner.after_step()
                learner.sync_buffers(self.tensors[number])
                total += loss.detach()
        return total

    def state(self, number: int) -> Tensors:
        optimiser, tensors = self.optimisers[number], self.tensors[number]
        return optimiser.state() | {
            f"buffer/{name}": tensors[name] for name in self.learners[number].mutated
        }

    def adopt(self) -> None:
        for learner, tensors in zip(self.learners, self.tensors, strict=True):
            learner.adopt({name: tensors[name] for name in learner.learned()})


def precise(recipe: Recipe) -> AbstractContextManager[None]:
    """Inside, float32 matrices are multiplied as the recipe says."""
    return _multiplied("tf32") if recipe.precision == "tf32" else nullcontext()


def exact() -> AbstractContextManager[None]:
    """Inside, matrices are multiplied in full precision, even if gradients need less."""
    return _multiplied("ieee")


@contextmanager
def _multiplied(precision: str) -> Iterator[None]:
    # Not by torch.set_float32_matmul_precision, which fails if somebody has set these.
    products = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = [own.fp32_precision for own in products]
    for own in products:
        own.fp32_precision = precision
    try:
        yield
    finally:
        for own, was in zip(products, before, strict=True):
            own.fp32_precision = was


@contextmanager
def at_most(threads: int | None) -> Iterator[None]:
    """Inside, operations on the CPU use at most this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, threads or before))
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""The training steps of a task, and running them one by one."""

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
    """Base class of ways to run the steps of a task, for one or for several learners.

    Attributes:
        tensors: for each learner the tensors that its steps use, by name.
    """

    learners: Sequence[Learner]
    tensors: Sequence[Tensors]

    def on_epoch_start(self, epoch: int) -> None:
        """Call every learner's `on_epoch_start`."""
        for learner, tensors in zip(self.learners, self.tensors, strict=True):
            if type(learner).on_epoch_start is Learner.on_epoch_start:
                continue  # nothing to call, so save the time of binding
            with learner.bound(tensors), torch.no_grad():
                learner.on_epoch_start(epoch)

    @abstractmethod
    def epoch(self, draws: Sequence[Draws], rates: Sequence[Sequence[float]], seed: int) -> Tensor:
        """Take all steps of an epoch.

        Args:
            draws: each learner's random numbers, with an entry for each step.
            rates: each learner's learning rates, one for each step.
            seed: for random operations of modules, such as dropout.

        Returns:
            The sum of the losses of each learner.
        """

    @abstractmethod
    def state(self, number: int) -> Tensors:
        """The tensors from which a learner can resume, by name; not copies."""

    @abstractmethod
    def adopt(self) -> None:
        """Let every learner adopt the parameters learned so far."""

    def resume(self, number: int, state: Tensors) -> None:
        """Set a learner's state to one that `state` gave."""
        for name, tensor in self.state(number).items():
            tensor.copy_(state[name])


class Eager(Steps):
    """Steps run one by one in Python, learner after learner."""

    def __init__(self, learners: Sequence[Learner]) -> None:
        self.learners = learners
        self.tensors, self.optimisers = [], []
        for learner in learners:
            learned = learner.learned()
            flat = flattened((tensor.detach() for tensor in learned.values()), 0)
            self.tensors.append(learner.step_inputs() | views(flat, learned))
            self.optimisers.append(make_optimiser(learner.feed.recipe, flat))

    def epoch(self, draws: Sequence[Draws], rates: Sequence[Sequence[float]], seed: int) -> Tensor:
        feed = self.learners[0].feed
        # Processes have different samples, so random operations of modules must differ, too.
        seed += feed.ranks.rank if feed.ranks else 0
        with seeds.seeded_rng(feed.device, seed):
            return torch.stack([self._epoch_of(n, d, rates[n]) for n, d in enumerate(draws)])

    def _epoch_of(self, number: int, draws: Draws, rates: Sequence[float]) -> Tensor:
        learner, optimiser = self.learners[number], self.optimisers[number]
        feed = learner.feed
        total = torch.zeros((), device=learner.feed.device, dtype=torch.float32)
        with (
            learner.bound(self.tensors[number]),
            matmul_precision(learner.feed.recipe),
            at_most(learner.threads),
        ):
            entries = (tensor.unbind() for tensor in draws.values())
            for lr, *entry in zip(rates, *entries, strict=True):
                loss, grads = learner.gradient(dict(zip(draws, entry, strict=True)))
                grad = flattened(grads, 0)
                if feed.ranks:
                    feed.ranks.average_(grad, feed.share)
                optimiser.step(grad, lr)
                learner.after_step()
                learner.sync_buffers(self.tensors[number])
                total += loss.detach()
        if feed.ranks:
            feed.ranks.average_(total, feed.share)
            feed.ranks.copy_first_(self.tensors[number][name] for name in learner.mutated)
        return total

    def state(self, number: int) -> Tensors:
        optimiser, tensors = self.optimisers[number], self.tensors[number]
        return optimiser.state() | {
            f"buffer/{name}": tensors[name] for name in self.learners[number].mutated
        }

    def adopt(self) -> None:
        for learner, tensors in zip(self.learners, self.tensors, strict=True):
            learner.adopt({name: tensors[name] for name in learner.learned()})


def matmul_precision(recipe: Recipe) -> AbstractContextManager[None]:
    """Inside, float32 matrices are multiplied in the recipe's precision."""
    return _float32_products("tf32") if recipe.precision == "tf32" else nullcontext()


def exact() -> AbstractContextManager[None]:
    """Inside, float32 matrices are multiplied in full precision, whatever the recipe says."""
    return _float32_products("ieee")


@contextmanager
def _float32_products(precision: str) -> Iterator[None]:
    # torch.set_float32_matmul_precision fails if somebody has set these attributes.
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = precision
    try:
        yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.fp32_precision = value


@contextmanager
def at_most(threads: int | None) -> Iterator[None]:
    """Inside, operations on the CPU use at most this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, threads or before))
    try:
        yield
    finally:
        torch.set_num_threads(before)

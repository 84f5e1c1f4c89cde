"""What a step is, and the plain way to take one.

A learner defines a step: a pure function of the learner's tensors and of what was drawn for it. So
it does not matter to the learner how its steps are taken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

from rankup import seeds
from rankup.layers import Tensors
from rankup.training.batches import Draws, Feed
from rankup.training.flat import gathered, views
from rankup.training.optim import make_optimiser
from rankup.training.recipe import Recipe

Form = Literal["stacked", "vmap", "branches"]

_HERE = nullcontext()


class Learner(nn.Module, ABC):
    """One network learning one task.

    Its tensors are named as attributes of the learner, as in `named_parameters()`. A method with
    steps of its own overrides `gradient` (other gradients, or a second backward pass), `after_step`
    (what must hold after every update) or `sample_epoch` (rows of a replay memory), and must not
    wait for the device in any of them.
    """

    # How several learners of this kind are captured in one graph: `gradient` itself takes tensors
    # with a leading dimension of replicas; or torch can `vmap` its loss; or each is a branch.
    replicas: Form = "branches"
    # Side streams of a captured step, for what need not wait for its data.
    beside: Sequence[torch.cuda.Stream] = ()
    threads: int | None = None  # CPU threads that a step is worth, if all would be too many
    mutated: tuple[str, ...] = ()  # what a step may change besides the parameters

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self.feed = feed
        self._begun: set[torch.cuda.Stream] = set()  # side streams with something to wait for

    @abstractmethod
    def learned(self) -> Tensors:
        """The parameters that steps change, as they are now."""

    @abstractmethod
    def step_inputs(self) -> Tensors:
        """All else that a step reads: data, and what is frozen."""

    @abstractmethod
    def adopt(self, learned: Tensors) -> None:
        """Adopt parameters that were learned."""

    @abstractmethod
    def forward(self, draw: Draws) -> Tensor:
        """The loss of one step."""

    def key(self) -> Hashable:
        """Learners with equal keys and tensors of equal shapes take the same steps, so that one
        captured graph serves them all."""
        return id(self)

    def sample_epoch(self, generator: torch.Generator) -> Draws:
        """All that is random in an epoch, with an entry for each step."""
        return self.feed.sample_epoch(generator)

    def gradient(self, draw: Draws) -> tuple[Tensor, Sequence[Tensor]]:
        """The loss of one step and its gradient for each parameter."""
        loss = self(draw)
        return loss, self.by_leaves(loss)

    def by_leaves(self, loss: Tensor) -> Sequence[Tensor]:
        """Gradients for each parameter; zeros for those that the module did not use."""
        return torch.autograd.grad(loss, self._leaves, materialize_grads=True)

    def after_step(self) -> None:
        """What to do after the parameters were changed: nothing by default."""

    def on_epoch_start(self, epoch: int) -> None:
        """Change what `step_inputs` and `learned` name before an epoch, counted from 0. By
        default does nothing."""

    def side_stream(self, number: int = 0) -> AbstractContextManager[object]:
        """Inside, compute concurrently with what comes after, if there are streams for it. What is
        read or made inside has to be held until `join`, or its memory could be reused before."""
        if not self.beside:
            return _HERE
        stream = self.beside[number % len(self.beside)]
        stream.wait_stream(torch.cuda.current_stream())
        self._begun.add(stream)
        return torch.cuda.stream(stream)

    def join(self) -> None:
        """Wait until all that was begun aside is done."""
        while self._begun:
            torch.cuda.current_stream().wait_stream(self._begun.pop())

    def forget_streams(self) -> None:
        self.beside = ()
        self._begun.clear()

    @contextmanager
    def bound(self, tensors: Tensors) -> Iterator[None]:
        """Inside, the learner's tensors are these."""
        before = {}
        self._leaves = [self.get_parameter(name) for name in self.learned()]
        try:
            for name, tensor in tensors.items():
                before[name] = self._exchange(name, tensor)
            yield
        finally:
            for name, tensor in before.items():
                self._exchange(name, tensor)

    @torch.no_grad()
    def sync_buffers(self, tensors: Tensors) -> None:
        """After a step, copy what the module assigned in place of the tensors that steps know back
        into these."""
        for name in self.mutated:
            now = self._exchange(name, tensors[name])
            if now is not tensors[name] and now.shape == tensors[name].shape:
                tensors[name].copy_(now)

    def _exchange(self, name: str, tensor: Tensor) -> Tensor:
        owner, _, key = name.rpartition(".")
        part = self.get_submodule(owner)
        if (parameter := part._parameters.get(key)) is not None:
            before, parameter.data = parameter.data, tensor
        else:
            before = part.get_buffer(key)
            part._buffers[key] = tensor
        return before


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
            flat = gathered((tensor.detach() for tensor in learned.values()), 0)
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
                optimiser.step(gathered(grads, 0), lr)
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

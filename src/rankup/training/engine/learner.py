"""The abstract learner: what one training step computes.

A step is a pure function of the learner's tensors and of the step's random draws, so it makes no
difference to the learner whether steps run eagerly or in a captured CUDA graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

from rankup.layers import Tensors
from rankup.training.batches import Draws, Feed

Form = Literal["stacked", "vmap", "branches"]

_SAME_STREAM = nullcontext()


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
            return _SAME_STREAM
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

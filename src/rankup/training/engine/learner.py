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
    """Base class of learners: one network learning one task.

    Tensors are named as in the learner's `named_parameters()` and `named_buffers()`. A method with
    its own steps overrides `gradient` (for other gradients, or a second backward pass),
    `after_step` (for what must hold after every update) or `sample_epoch` (for rows of a replay
    memory). None of them may wait for the device.

    Attributes:
        replicas: how one CUDA graph runs several learners. `"stacked"`: `gradient` itself takes
            tensors with a leading dimension of replicas; `"vmap"`: torch maps the loss over them;
            `"branches"`: each learner's step is a parallel branch of the graph.
        side_streams: streams on which parts of a captured step may run.
        threads: the most CPU threads that speed up a step; None for all.
        mutated: names of tensors that a step may change besides the parameters.
        owned: names of inputs that nobody else holds, so that a captured step need not copy them.
        gains_by_compiling: whether compiling saves more time in all steps than it takes.
    """

    replicas: Form = "branches"
    side_streams: Sequence[torch.cuda.Stream] = ()
    threads: int | None = None
    mutated: tuple[str, ...] = ()
    owned: frozenset[str] = frozenset()
    gains_by_compiling = False
    is_compiled = False

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self.feed = feed
        self._busy: set[torch.cuda.Stream] = set()  # side streams to wait for

    @abstractmethod
    def learned(self) -> Tensors:
        """The parameters that steps change, by name."""

    @abstractmethod
    def step_inputs(self) -> Tensors:
        """The other tensors that a step reads, by name: data and frozen tensors."""

    @abstractmethod
    def adopt(self, learned: Tensors) -> None:
        """Set the network's parameters to these values."""

    @abstractmethod
    def forward(self, draw: Draws) -> Tensor:
        """The loss of one step."""

    def key(self) -> Hashable:
        """Learners with equal keys and tensors of equal shapes take the same steps, so one captured
        graph serves them all."""
        return id(self)

    def compile_module(self) -> None:
        """Compile the module for all further steps, if the learner can."""

    def sample_epoch(self, generator: torch.Generator) -> Draws:
        """An epoch's random numbers, with an entry for each step."""
        return self.feed.sample_epoch(generator)

    def gradient(self, draw: Draws) -> tuple[Tensor, Sequence[Tensor]]:
        """The loss of one step and its gradient for each parameter."""
        loss = self(draw)
        return loss, self.gradients_of(loss)

    def gradients_of(self, loss: Tensor) -> Sequence[Tensor]:
        """The gradient of a loss for each parameter: zeros for unused ones."""
        return torch.autograd.grad(loss, self._leaves, materialize_grads=True)

    def after_step(self) -> None:
        """Called after each update of the parameters; does nothing by default."""

    def on_epoch_start(self, epoch: int) -> None:
        """Called before each epoch, counted from 0, to change tensors of `step_inputs` and
        `learned` in place; does nothing by default."""

    def side_stream(self, number: int = 0) -> AbstractContextManager[object]:
        """Inside, operations run concurrently with those after the block, if there are streams.
        Hold tensors that are used inside until `join`, or their memory could be reused."""
        if not self.side_streams:
            return _SAME_STREAM
        stream = self.side_streams[number % len(self.side_streams)]
        stream.wait_stream(torch.cuda.current_stream())
        self._busy.add(stream)
        return torch.cuda.stream(stream)

    def join(self) -> None:
        """Wait for the side streams."""
        while self._busy:
            torch.cuda.current_stream().wait_stream(self._busy.pop())

    def drop_side_streams(self) -> None:
        self.side_streams = ()
        self._busy.clear()

    @contextmanager
    def bound(self, tensors: Tensors) -> Iterator[None]:
        """Inside, the learner uses these tensors in place of its own."""
        before = {}
        self._leaves = [self.get_parameter(name) for name in self.learned()]
        try:
            for name, tensor in tensors.items():
                before[name] = self._swap(name, tensor)
            yield
        finally:
            for name, tensor in before.items():
                self._swap(name, tensor)

    @torch.no_grad()
    def sync_buffers(self, tensors: Tensors) -> None:
        """After a step, copy buffers that the module has replaced back into these tensors."""
        for name in self.mutated:
            buffer = self._swap(name, tensors[name])
            if buffer is not tensors[name] and buffer.shape == tensors[name].shape:
                tensors[name].copy_(buffer)

    def _swap(self, name: str, tensor: Tensor) -> Tensor:
        """Bind a tensor to a name and return the one it replaces."""
        path, _, key = name.rpartition(".")
        module = self.get_submodule(path)
        if (parameter := module._parameters.get(key)) is not None:
            before, parameter.data = parameter.data, tensor
        else:
            before = module.get_buffer(key)
            module._buffers[key] = tensor
        return before

"""The learner of any module: by autograd, it learns all parameters that are not frozen."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankup.layers import TaskLayer, Tensors, active
from rankup.training.batches import Draws, Feed
from rankup.training.engine.learner import Learner
from rankup.training.memory_format import channels_last, convolves, takes_channels_last
from rankup.training.recipe import Recipe
from rankup.utils.compiling import call, growing_parameters


def loss_of(recipe: Recipe, logits: Tensor, labels: Tensor) -> Tensor:
    if recipe.loss == "cross-entropy":
        return F.cross_entropy(logits, labels)
    return losses_of(recipe, logits, labels).mean()


def losses_of(recipe: Recipe, logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of each sample."""
    if recipe.loss == "cross-entropy":
        return F.cross_entropy(logits, labels, reduction="none")
    # Not F.one_hot: torch's deterministic scatter on a GPU cannot be mapped over seeds.
    wanted = labels[:, None] == torch.arange(logits.shape[1], device=labels.device)
    squares = (logits.softmax(1) - wanted.to(logits.dtype)).square()
    # In batches of tasks of different sizes, classes that a sample's task lacks are −∞.
    return squares.sum(1) / (logits > -math.inf).sum(1)


class ModuleLearner(Learner):
    """Learns the parameters of `body` that are not frozen.

    Args:
        index: the index of the task that is learned.
    """

    x: Tensor
    y: Tensor

    def __init__(self, body: nn.Module, feed: Feed, index: int) -> None:
        super().__init__(feed)
        self.body, self.index = body, index
        self.active = index  # the task that layers run for
        self.kind: Hashable = id(body)  # bodies of one kind take the same steps
        self._step_inputs = self._buffers_without_task()
        self.mutated = tuple(self._step_inputs) if self._parameters_of_body() else ()
        self.register_input("x", feed.x)
        self.register_input("y", feed.task.train_y)
        self._convolves = convolves(body)
        overrides_steps = type(self).gradient is not Learner.gradient or (
            type(self).after_step is not Learner.after_step
        )
        cannot_vmap = self._convolves or self.mutated or overrides_steps
        self.replicas = "branches" if cannot_vmap else "vmap"

    def learned(self) -> Tensors:
        return dict(self._parameters_of_body())

    def step_inputs(self) -> Tensors:
        return self._step_inputs

    def register_input(self, name: str, value: Tensor | nn.Module) -> None:
        """Register a tensor, or all tensors of a module, as inputs of the steps."""
        if isinstance(value, Tensor):
            self.register_buffer(name, value)
            self._step_inputs[name] = value
        else:
            self.add_module(name, value)
            # Not from its state dict, to which a module may add other things.
            parameters = value.named_parameters(remove_duplicate=False)
            tensors = chain(parameters, value.named_buffers(remove_duplicate=False))
            self._step_inputs |= {f"{name}.{key}": tensor.detach() for key, tensor in tensors}

    def adopt(self, learned: Tensors) -> None:
        for name, parameter in self._parameters_of_body().items():
            parameter.data = learned[name].detach()

    def key(self) -> Hashable:
        transform = id(self.feed.task.transform) if self.feed.transforms_batches else None
        # What steps mutate tells whether a norm learns its statistics or uses them.
        return type(self), self.kind, transform, self.mutated

    def forward(self, draw: Draws) -> Tensor:
        with active(self.active), self._autocast():
            return loss_of(self.feed.recipe, self.logits(draw), self.feed.labels(self.y, draw))

    def logits(self, draw: Draws) -> Tensor:
        return self.answer(self.inputs(draw))

    def answer(self, x: Tensor) -> Tensor:
        """The body's answer to these inputs."""
        if not self.is_compiled:
            return self.body(x)  # type: ignore[no-any-return]
        with growing_parameters():
            return self._compiled(self.body, x)

    def compile_module(self) -> None:
        self._compiled: Callable[[nn.Module, Tensor], Tensor] = torch.compile(call)
        self.is_compiled = True

    def inputs(self, draw: Draws) -> Tensor:
        return self.formatted(self.feed.batch(self.x, draw))

    def formatted(self, x: Tensor) -> Tensor:
        """Inputs in the memory format that the body runs on fastest."""
        if not (self._convolves and takes_channels_last(self.body, x)):
            return x
        self.feed.channels_last = True  # a kernel makes the next batches in this format
        return channels_last(x)

    @property
    def _is_bf16(self) -> bool:
        return self.feed.recipe.precision == "bfloat16"

    def _autocast(self) -> AbstractContextManager[object]:
        if not self._is_bf16:
            return nullcontext()
        return torch.autocast(self.feed.device.type, torch.bfloat16)

    def _parameters_of_body(self) -> dict[str, nn.Parameter]:
        named = self.body.named_parameters()
        return {f"body.{name}": p for name, p in named if p.requires_grad}

    def _buffers_without_task(self) -> Tensors:
        """The buffers of all modules but task layers."""
        return {
            f"body.{name}.{key}" if name else f"body.{key}": tensor
            for name, module in self.body.named_modules()
            if not isinstance(module, TaskLayer)
            for key, tensor in module.named_buffers(recurse=False)
        }

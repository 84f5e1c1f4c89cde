"""How any module with a head per task learns a task, as the engine sees it."""

from __future__ import annotations

import math
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankup.layers import TaskLayer, Tensors, active
from rankup.training.batches import Draws, Feed, take
from rankup.training.engine.learner import Learner
from rankup.training.memory_format import channels_last, convolves, takes_channels_last
from rankup.training.recipe import Recipe


def loss_of(recipe: Recipe, logits: Tensor, labels: Tensor) -> Tensor:
    if recipe.loss == "cross-entropy":
        return F.cross_entropy(logits, labels)
    # Not F.one_hot: torch's deterministic scatter on a GPU cannot be mapped over seeds.
    wanted = labels[:, None] == torch.arange(logits.shape[1], device=labels.device)
    squares = (logits.softmax(1) - wanted.to(logits.dtype)).square()
    # Among tasks of different sizes, classes that a sample's own lacks are −∞ and do not count.
    return (squares.sum(1) / (logits > -math.inf).sum(1)).mean()


class ModuleLearner(Learner):
    """Learns all parameters of a module that are not frozen. Its layers know about tasks if they
    need to."""

    x: Tensor
    y: Tensor

    def __init__(self, body: nn.Module, feed: Feed, index: int) -> None:
        super().__init__(feed)
        self.body, self.index = body, index
        self.kind: Hashable = id(body)  # bodies of one kind take the same steps
        self._reads = self._constant()
        self.mutated = tuple(self._reads) if self._parameters_of_body() else ()
        self.register_input("x", feed.x)
        self.register_input("y", feed.task.train_y)
        self._convolves = convolves(body)
        own_steps = type(self).gradient is not Learner.gradient or (
            type(self).after_step is not Learner.after_step
        )
        alone = self._convolves or self.mutated or own_steps
        self.replicas = "branches" if alone else "vmap"

    def learned(self) -> Tensors:
        return dict(self._parameters_of_body())

    def step_inputs(self) -> Tensors:
        return self._reads

    def register_input(self, name: str, it: Tensor | nn.Module) -> None:
        """Register a tensor, or all tensors of a module, for steps to read."""
        if isinstance(it, Tensor):
            self.register_buffer(name, it)
            self._reads[name] = it
        else:
            self.add_module(name, it)
            # Not from its state dict, to which a module may add other things.
            parameters = it.named_parameters(remove_duplicate=False)
            tensors = chain(parameters, it.named_buffers(remove_duplicate=False))
            self._reads |= {f"{name}.{key}": tensor.detach() for key, tensor in tensors}

    def adopt(self, learned: Tensors) -> None:
        for name, parameter in self._parameters_of_body().items():
            parameter.data = learned[name].detach()

    def key(self) -> Hashable:
        # Data that is made at every step goes through the task's own transform.
        transform = id(self.feed.task.transform) if self.feed.transforms_batches else None
        # What steps change tells whether a module learns its statistics or uses them.
        return type(self), self.kind, transform, self.mutated

    def forward(self, draw: Draws) -> Tensor:
        with active(self.index), self._autocast():
            return loss_of(self.feed.recipe, self.logits(draw), take(self.y, draw["rows"]))

    def logits(self, draw: Draws) -> Tensor:
        logits: Tensor = self.body(self.inputs(draw))
        return logits

    def inputs(self, draw: Draws) -> Tensor:
        return self._laid_out(self.feed.batch(self.x, draw))

    def _laid_out(self, x: Tensor) -> Tensor:
        if not (self._convolves and takes_channels_last(self.body, x)):
            return x
        self.feed.channels_last = True  # batches are made so from now on, if possible
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

    def _constant(self) -> Tensors:
        """Buffers of modules that know nothing of tasks."""
        return {
            f"body.{name}.{key}" if name else f"body.{key}": tensor
            for name, part in self.body.named_modules()
            if not isinstance(part, TaskLayer)
            for key, tensor in part.named_buffers(recurse=False)
        }

"""The base of methods that never forget because they freeze the weights that learned tasks use."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rankup.layers import Tensors, active
from rankup.layers.spec import FactoredSpec
from rankup.methods.base import Setting
from rankup.methods.shared.dense import DenseMethod
from rankup.methods.shared.layout import Layout, Layouts
from rankup.training.batches import Feed
from rankup.training.engine.module import ModuleLearner
from rankup.training.memory_format import for_answers
from rankup.utils.torch_modes import evaluating


class GuardedMethod(DenseMethod):
    """Freezes entries of the weights of `layers`; which ones, subclasses decide. Norms are per
    task; all other parameters are learned with the first task and constant after it.

    Attributes:
        layers: the specs of all Linears and convolutions but the head.
    """

    norms = "per task"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.layers = [spec for spec in self.plan.layers if isinstance(spec, FactoredSpec)]

    def constant(self) -> Tensors:
        """A mask `[]` for each parameter that tasks share: all frozen after the first task."""
        frozen = torch.tensor(self.learned > 0, device=self.device)
        return dict.fromkeys(self.shared_parameters(), frozen)


class SubnetMethod(GuardedMethod):
    """A method whose tasks each use a subset of the weights, and biases of their own.

    Attributes:
        weights: the weights of `layers`, by name.
        biases: their biases, by name.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        weights = [f"{spec.name}.weight" for spec in self.layers]
        biases = [f"{spec.name}.bias" for spec in self.layers if spec.bias]
        self.weights = {name: self.body.get_parameter(name) for name in weights}
        self.biases = {name: self.body.get_parameter(name) for name in biases}
        for name, bias in self.biases.items():
            self.kept[name] = bias.detach().new_empty(0, len(bias))

    @abstractmethod
    def weights_of(self, task: int) -> Tensors:
        """The weights that a learned or the open task uses, by name; those left out are used as
        they are."""

    def predict(self, x: Tensor, task: int) -> Tensor:
        tensors = self.weights_of(task)
        if task < self.learned:
            tensors = tensors | {name: self.kept[name][task] for name in self.biases}
        with evaluating(self.body), active(task):
            inputs = for_answers(self.body, x)
            logits: Tensor = functional_call(self.body, tensors, (inputs,))
        return logits

    def consolidate(self, feed: Feed) -> None:
        for name, bias in self.biases.items():
            self.kept[name] = torch.cat([self.kept[name], bias.detach()[None]])

    @torch.no_grad()
    def take_last_biases(self) -> None:
        """Start from the biases of the previous task."""
        for name, bias in self.biases.items():
            if self.learned:
                bias.copy_(self.kept[name][-1])

    def kept_layouts(self, learned: int) -> Layouts:
        return {
            f"kept/{name}": Layout((learned, len(bias)), bias.dtype)
            for name, bias in self.biases.items()
        }

    def _shared(self) -> Tensors:
        return {name: t for name, t in super()._shared().items() if name not in self.biases}


class GuardedLearner(ModuleLearner):
    """Learns a module in which some entries of parameters are frozen. They are restored after
    every step, because zeroing their gradients would not be enough: Adam moves on by its averages,
    and weight decay needs no gradient.

    Args:
        frozen: masks of the frozen entries, by the parameters' names in the module; they are
            broadcast to the parameters' shapes.
        held: the values of frozen entries, by the same names; by default the current ones.
    """

    def __init__(
        self, body: nn.Module, feed: Feed, index: int, frozen: Tensors, held: Tensors | None = None
    ) -> None:
        super().__init__(body, feed, index)
        self._guarded = [f"body.{name}" for name in frozen]
        for name, mask in frozen.items():
            values = (held or {}).get(name, body.get_parameter(name).detach())
            self.register_input(buffer_name("frozen", f"body.{name}"), mask.clone())
            self.register_input(buffer_name("held", f"body.{name}"), values.clone())

    def frozen(self, name: str) -> Tensor:
        """The mask of a parameter, by its name in this learner."""
        return self.get_buffer(buffer_name("frozen", name))

    def after_step(self) -> None:
        self.put_back()

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the frozen entries."""
        for name in self._guarded:
            parameter, held = self.get_parameter(name), self.get_buffer(buffer_name("held", name))
            parameter.copy_(torch.where(self.frozen(name), held, parameter))


def buffer_name(kind: str, name: str) -> str:
    """The name of a learner's buffer that belongs to a parameter. Buffer names cannot have dots."""
    return f"{kind}/{name}".replace(".", "/")

"""Methods that never forget because some weights stay as they are, to the bit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rankup.feed import Feed
from rankup.layers import Tensors
from rankup.learner import ModuleLearner
from rankup.methods.base import Setting
from rankup.methods.dense import DenseMethod
from rankup.specs import FactoredSpec


class GuardedMethod(DenseMethod):
    """A method that keeps the weights of `layers` for the tasks that need them. Norms are per task;
    what else a module may have is learned with the first task and constant after it."""

    norms = "per task"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.layers = [spec for spec in self.plan.layers if isinstance(spec, FactoredSpec)]

    def constant(self) -> Tensors:
        """Whether each parameter that tasks share is frozen, if nothing else is said."""
        shared = [name for name, t in self._shared().items() if isinstance(t, nn.Parameter)]
        return {name: torch.tensor(self.learned > 0, device=self.device) for name in shared}


class GuardedLearner(ModuleLearner):
    """A module of whose parameters some numbers must not move. A gradient of zero would not hold
    them: Adam goes on by its averages, and weight decay asks for no gradient. So they are put back
    after every step, whatever that made of them.

    Args:
        frozen: which numbers are to stay, for parameters by their names in the module; masks are
            broadcast.
        held: what frozen numbers are, by the same names, where that is not what they are now.
    """

    def __init__(
        self, body: nn.Module, feed: Feed, index: int, frozen: Tensors, held: Tensors | None = None
    ) -> None:
        super().__init__(body, feed, index)
        self._guarded = [f"body.{name}" for name in frozen]
        for name, mask in frozen.items():
            values = (held or {}).get(name, body.get_parameter(name).detach())
            self.look_at(buffer_name("frozen", f"body.{name}"), mask.clone())
            self.look_at(buffer_name("held", f"body.{name}"), values.clone())

    def frozen(self, name: str) -> Tensor:
        return self.get_buffer(buffer_name("frozen", name))

    def settle(self) -> None:
        self.put_back()

    @torch.no_grad()
    def put_back(self) -> None:
        for name in self._guarded:
            parameter, held = self.get_parameter(name), self.get_buffer(buffer_name("held", name))
            parameter.copy_(torch.where(self.frozen(name), held, parameter))


def buffer_name(kind: str, name: str) -> str:
    """The buffer's name for what a learner knows of a parameter: such names have no dots."""
    return f"{kind}/{name}".replace(".", "/")

"""The part of a network that guesses tasks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rankup.errors import TaskStateError
from rankup.growing.options import GrowOptions
from rankup.growing.routing import RouterRule
from rankup.net import validate
from rankup.net.guess import Drift, Guess, drift, guess
from rankup.net.routers.routing import Routing

if TYPE_CHECKING:
    from rankup.net.network import IncrementalNet


class Guessing:
    """What `IncrementalNet` can say of inputs without being told their task."""

    options: GrowOptions
    routing: Routing | None

    @property
    def router(self) -> str | None:
        """How the network guesses tasks, as `grow(router=…)` takes it; None if it cannot. May be
        set before the first task."""
        return None if self.options.router is None else str(self.options.router)

    @router.setter
    def router(self, router: str | None) -> None:
        if self._network.tasks or self._network.learning is not None:
            raise TaskStateError(
                "a network's router is fixed before its first task: all tasks need the same"
            )
        rule = None if router is None else RouterRule.parse(router)
        self.options = replace(self.options, router=rule)
        self.routing = None if rule is None else Routing(rule, self.options.seed)

    def guess(
        self, x: Tensor, *, likeliest: int | None = None, together: bool = False, **options: Any
    ) -> Guess:
        """Which tasks samples are of, how sure that is, and whether they look like any of them.

        Args:
            x: inputs as they are: no task's transform is applied to them.
            likeliest: as for calling the network.
            together: whether all are of one task, which is then far easier to tell.
            options: the module's other arguments.
        """
        net = self._network
        validate.inputs(x, net.dtype, options)
        return guess(net, x, options, likeliest, together)

    def drift(self, x: Tensor, *, false_alarms: float = 0.05, **options: Any) -> Drift:
        """Whether so many of these inputs look like no known task that a new one may be needed.

        Args:
            x: inputs as they come, the more the surer.
            false_alarms: the share of a task's own inputs that may be taken for strange.
            options: the module's other arguments.
        """
        return drift(self.guess(x, **options), false_alarms)

    @property
    def _network(self) -> IncrementalNet:
        return self  # type: ignore[return-value]

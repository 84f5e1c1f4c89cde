"""The part of a network that several processes learn together."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from rankup.distributed import sharding
from rankup.distributed.ranks import Ranks, current
from rankup.errors import TaskStateError

if TYPE_CHECKING:
    from rankup.net.network import IncrementalNet


class Distributing:
    """What `IncrementalNet` does in a process group of torch.distributed."""

    _together: bool | None = None  # whether the ranks of a process group learn as one

    def distribute(self, together: bool = True, *, shard: bool = False) -> IncrementalNet:
        """Let all processes of torch's process group learn this network as one, or with
        `together=False` each a network of its own; return the network.

        As one, a task's gradients are averaged over all processes at the end of every backward
        pass, without a wrapper; batch norms use the statistics of all their batches, in training
        and at the commit; and a task is committed only if all have learned the same bits. Each
        process takes samples of its own, as many as the others. Outside of a process group nothing
        changes, so a script for several processes also runs in one.

        Args:
            shard: divide the weights that factored layers kept of a pretrained module among the
                processes, for one that is too large for each. A layer's weight is gathered while
                it runs, so all processes must run the network the same number of times.
        """
        net: IncrementalNet = self  # type: ignore[assignment]
        if net.learning is not None:
            raise TaskStateError("distribute the network between tasks, not while it learns one")
        self._together = together
        if shard and self.ranks is not None:
            sharding.shard(net.layers)
        return net

    def gathered(self) -> AbstractContextManager[None]:
        """Inside, all of a divided base is in every process, to save or merge the network; all
        processes must enter."""
        net: IncrementalNet = self  # type: ignore[assignment]
        return sharding.unsharded(net.layers)

    @property
    def ranks(self) -> Ranks | None:
        """The processes that learn this network together, if there are several."""
        return current() if self._together else None

    @property
    def is_undecided(self) -> bool:
        """Whether nobody has said if the processes of a group learn this network together."""
        return self._together is None and current() is not None

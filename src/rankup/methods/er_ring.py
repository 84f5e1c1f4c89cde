"""ER-Ring, experience replay with a ring buffer (Chaudhry et al., *On Tiny Episodic Memories in
Continual Learning*, 2019): every step is on a batch B of the task and a batch M from a memory of
earlier tasks,

    1/|B ∪ M| · Σ_{(x, y, t) ∈ B ∪ M} ℓ(f_t(x), y),

where f_t is the network with the head of task t.
"""

from torch import Tensor

from rankup import seeds
from rankup.methods.shared.replay import ReplayLearner, ReplayMethod, joined
from rankup.training.batches import Draws, Feed


class ERRingLearner(ReplayLearner):
    """The loss of the task's batch and a batch from the memory, joined."""

    def forward(self, draw: Draws) -> Tensor:
        batch = self.current(draw)
        return self.loss(joined(batch, self.replayed(draw)) if self.held else batch)


class ERRing(ReplayMethod):
    """The memory is first in, first out: it holds the last samples of each class that training
    drew. Samples of the open task enter it when the task ends; until then its own batches contain
    them. Norms are shared; batch norms see the task's batch and the memory's as one.
    """

    learner_class = ERRingLearner

    def order(self, feed: Feed) -> Tensor:
        """Rows in the order in which the last epoch drew them."""
        last = seeds.epoch_generator(self.seed, self.learned, self.recipe.epochs - 1, feed.device)
        return feed.sample_epoch(last)["rows"].flatten()

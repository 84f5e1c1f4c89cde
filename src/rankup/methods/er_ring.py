"""Experience replay with a ring buffer (Chaudhry et al., On Tiny Episodic Memories, 2019)."""

from torch import Tensor

from rankup import seeds
from rankup.methods.shared.replay import ReplayLearner, ReplayMethod, joined
from rankup.training.batches import Draws, Feed


class ERRingLearner(ReplayLearner):
    def forward(self, draw: Draws) -> Tensor:
        batch = self.current(draw)
        return self.loss(joined(batch, self.replayed(draw)) if self.held else batch)


class ERRing(ReplayMethod):
    """Every step is on the task's batch and a memory batch together, each sample answered by its
    own task's head.

    The memory is first in, first out: it holds the last samples of each class that training drew.
    Those of the task being learned enter it when the task ends, as its batches hold them until
    then. Norms are shared; batch norms see the task's batch and the memory's as one.
    """

    learner_class = ERRingLearner

    def order(self, feed: Feed) -> Tensor:
        last = seeds.epoch_generator(self.seed, self.learned, self.recipe.epochs - 1, feed.device)
        return feed.sample_epoch(last)["rows"].flatten()

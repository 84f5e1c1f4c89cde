"""Steps as a captured graph takes them, on a machine without a GPU."""

from collections.abc import Sequence

from torch import Tensor

from rankup.training.batches import Draws
from rankup.training.engine.eager import Eager
from rankup.training.engine.module import ModuleLearner


class Replayed(Eager):
    """Steps of the first learner it was given, on tensors of its own: those of any later learner
    are copied in, and what was learned is copied out."""

    def __init__(self, learner: ModuleLearner) -> None:
        super().__init__([learner])
        self.captured = learner
        learned = learner.learned()
        (tensors,) = self.tensors
        self.tensors = [{n: t if n in learned else t.clone() for n, t in tensors.items()}]

    def start(self, learner: ModuleLearner) -> None:
        self.learners = [learner]
        for name, tensor in (learner.step_inputs() | learner.learned()).items():
            self.tensors[0][name].copy_(tensor.detach())
        self.optimisers[0].restart()
        self.captured.index, self.captured.active = learner.index, learner.active  # the open task

    def epoch(self, draws: Sequence[Draws], rates: Sequence[Sequence[float]], seed: int) -> Tensor:
        learners, self.learners = self.learners, [self.captured]
        try:
            return super().epoch(draws, rates, seed)
        finally:
            self.learners = learners

    def adopt(self) -> None:
        (learner,), (tensors,) = self.learners, self.tensors
        learner.adopt({name: tensors[name] for name in learner.learned()})
        for name in learner.mutated:
            learner.step_inputs()[name].copy_(tensors[name])

"""Plain sequential fine-tuning: every task goes on training the weights that the one before left.
Nothing is done against forgetting, which makes it the baseline of all continual methods."""

from rankup.methods.shared.dense import DenseMethod
from rankup.methods.shared.layout import Layouts


class FineTune(DenseMethod):
    """One dense network with a head per task. All other weights, and the norms, are shared."""

    def kept_layouts(self, learned: int) -> Layouts:
        return {}

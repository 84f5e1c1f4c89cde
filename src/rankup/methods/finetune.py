"""Plain sequential fine-tuning: one dense network, a head per task, nothing against forgetting."""

from rankup.methods.shared.dense import DenseMethod
from rankup.methods.shared.layout import Layouts


class FineTune(DenseMethod):
    """All weights but the heads are shared and keep learning; norms are shared too."""

    def kept_layouts(self, learned: int) -> Layouts:
        return {}

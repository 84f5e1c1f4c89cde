"""GPM, gradient projection memory (Saha, Garg and Roy, ICLR 2021): no step moves a layer's weights
within the space that its inputs for earlier tasks span,

    ΔW ← ΔW · (I − BᵀB),

where the rows of B are an orthonormal basis of that space.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankup.methods.base import Setting
from rankup.methods.options import GpmOptions
from rankup.methods.shared import spaces
from rankup.methods.shared.layout import Layout, Layouts
from rankup.methods.shared.spaces import Confined, ConfinedLearner, ConfinedMethod, Free
from rankup.training.batches import Feed
from rankup.training.engine.learner import Learner


class GPM(ConfinedMethod):
    """After each task, a layer's basis is extended by the leading singular vectors of that part of
    its inputs, for a few samples of the task, which lies outside of its span: by the fewest with
    which it holds a given share of the inputs' energy. The share grows with every task, up to 1.

    With plain gradient descent, the default, projecting the step is projecting the gradient, as in
    the paper.

    The weights, the heads and the bases are stored. The authors have no biases; here one is the
    weight of an input that is always 1. They learn norms with the first task alone; here each task
    has its own.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.options = setting.options_of(GpmOptions)
        for name, width in self.widths.items():
            self.kept[name] = torch.zeros(0, width, device=self.device)

    def learner(self, feed: Feed) -> Learner:
        if not self.learned:
            return super().learner(feed)
        confined = [
            Confined(layer, outside(self.kept[name])) for name, layer in self.layers.items()
        ]
        return ConfinedLearner(self.body, feed, self.learned, nn.ModuleList(confined))

    def consolidate(self, feed: Feed) -> None:
        sums, rests = {}, {}
        place: dict[str, Any] = {"device": self.device, "dtype": torch.float64}
        for name, width in self.widths.items():
            count = width if width < spaces.WIDE else spaces.MAIN
            sums[name] = torch.zeros(count, width, **place)
            if count < width:
                rests[name] = torch.zeros((), **place)
        self.add_inputs(feed, self.options.samples, "spaces", sums, rests)
        share = min(1.0, self.options.threshold + self.options.rise * self.learned)
        self.kept = {
            name: extended(basis, sums[name], rests[name], share)
            if name in rests
            else extended(basis, roots(sums[name]), torch.zeros((), **place), share)
            for name, basis in self.kept.items()
        }

    def kept_layouts(self, learned: int) -> Layouts:
        return {
            f"kept/{name}": Layout((range(width + 1) if learned else 0, width), torch.float32)
            for name, width in self.widths.items()
        }


def roots(covariance: Tensor) -> Tensor:
    """Orthogonal rows `R [D, D]` with `RᵀR` equal to the covariance."""
    energies, vectors = torch.linalg.eigh(covariance)
    rows: Tensor = energies.clamp(min=0).sqrt()[:, None] * vectors.t()
    return rows


def extended(basis: Tensor, rows: Tensor, rest: Tensor, share: float) -> Tensor:
    """The orthonormal rows of `basis [k, D]` and the fewest further ones with which they hold the
    given share of the energy of `rows [N, D]` and of a rest whose directions are not known.

    >>> rows, none = torch.diag(torch.tensor([3.0, 2.0, 1.0])), torch.zeros(())
    >>> extended(torch.zeros(0, 3), rows, none, 0.9).abs()  # 9 + 4 of 14
    tensor([[1., 0., 0.],
            [0., 1., 0.]])
    """
    rows, old = rows.double(), basis.double()
    new = rows - rows @ old.t() @ old
    wanted = share * (rows.square().sum() + rest) - (rows.square().sum() - new.square().sum())
    # By falling energy. Directions below the noise are what rounding leaves of the basis itself.
    energies, vectors = (t.flip(-1) for t in torch.linalg.eigh(new @ new.t()))
    noise = torch.finfo(torch.float32).eps * (rows.square().sum() + rest)
    held = F.pad(energies.cumsum(0)[:-1], (1, 0))  # the energy of all directions before each
    added = int(((held < wanted) & (energies > noise)).sum())
    directions = vectors[:, :added].t() @ new / energies[:added].sqrt()[:, None]
    return torch.cat([basis, directions.to(basis)])


def outside(basis: Tensor) -> Free:
    """The projection onto the orthogonal complement of a basis. Its tensor has the same shape for
    most tasks, so that a captured graph of the steps serves the next task, too."""
    count, width = basis.shape
    if width < spaces.WIDE:
        rows = basis.double()
        return spaces.Within(
            torch.eye(width, device=rows.device, dtype=rows.dtype) - rows.t() @ rows
        )
    return spaces.Without(F.pad(basis, (0, 0, 0, -count % spaces.MAIN)))

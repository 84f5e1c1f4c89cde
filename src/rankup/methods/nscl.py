"""Adam-NSCL (Wang et al., *Training Networks in Null Space of Feature Covariance for Continual
Learning*, CVPR 2021): every step ΔW of the optimiser is projected onto the directions in which the
inputs of the layer, over all tasks so far, have the least energy,

    ΔW ← ΔW · NNᵀ,

where the columns of N are the eigenvectors of the inputs' covariance with the smallest eigenvalues.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rankup.methods.base import Setting
from rankup.methods.options import NsclOptions
from rankup.methods.shared import spaces
from rankup.methods.shared.layout import Layout, Layouts
from rankup.methods.shared.spaces import Confined, ConfinedLearner, ConfinedMethod, Free
from rankup.training.batches import Feed
from rankup.training.engine.learner import Learner

_REST = ".rest"  # suffix to a layer's name: the energy of all other directions


class NSCL(ConfinedMethod):
    """The authors take the eigenvectors whose eigenvalues are below a multiple of the smallest, and
    monitor the share of energy that they hold. Here that share is the option, so that it means the
    same for every layer; directions without any energy are always free. The authors' code also
    divides a projection by its norm, which lowers the learning rate of layers with more free
    directions; here the rate is the recipe's.

    The weights, the heads and half of each symmetric covariance are stored, the latter as a sum
    over samples, so that no count is needed. A layer with thousands of inputs, such as the first of
    an MLP on large images, keeps the 1,024 directions with the most energy instead, and the total
    energy of all others, which are free.

    Norms are per task; the authors share theirs, under a penalty.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.options = setting.options_of(NsclOptions)
        for name, width in self.widths.items():
            if width < spaces.WIDE:
                self.kept[name] = torch.zeros(width * (width + 1) // 2, device=self.device)
            else:
                self.kept[name] = torch.zeros(spaces.MAIN, width, device=self.device)
                self.kept[name + _REST] = torch.zeros((), device=self.device)

    def learner(self, feed: Feed) -> Learner:
        if not self.learned:
            return super().learner(feed)
        confined = [Confined(layer, self._free(name)) for name, layer in self.layers.items()]
        return ConfinedLearner(self.body, feed, self.learned, nn.ModuleList(confined))

    def _free(self, name: str) -> Free:
        kept, energy = self.kept[name], self.options.energy
        if kept.dim() == 1:
            return spaces.Within(null_space(unpacked(kept), energy))
        return spaces.Without(main_directions(kept, self.kept[name + _REST], energy))

    def consolidate(self, feed: Feed) -> None:
        sums = {name: unpacked(t).double() for name, t in self.kept.items() if t.dim() == 1}
        kept = {name: t.clone() for name, t in self.kept.items() if name not in sums}
        rests = {name: kept[name + _REST] for name in kept if name + _REST in kept}
        self.add_inputs(feed, len(feed), "covariance", sums | kept, rests)
        self.kept = kept | {name: packed(total) for name, total in sums.items()}

    def kept_layouts(self, learned: int) -> Layouts:
        return {
            f"kept/{name}": Layout.like(t, least=0 if name.endswith(_REST) else -math.inf)
            for name, t in self.kept.items()
        }


def null_space(covariance: Tensor, energy: float) -> Tensor:
    """`[D, D]`: the projection onto the eigenvectors of `covariance [D, D]` with the smallest
    eigenvalues, as many as together hold no more than the share `energy` of their sum.

    >>> null_space(torch.tensor([[9.0, 0.0, 0.0], [0.0, 0.9, 0.0], [0.0, 0.0, 0.1]]), 0.05).diag()
    tensor([0., 0., 1.], dtype=torch.float64)
    """
    values, vectors = torch.linalg.eigh(covariance.double())
    noise = torch.finfo(torch.float32).eps * values.sum()  # as covariances are stored in float32
    held = torch.where(values > noise, values, 0).cumsum(0)
    null = vectors[:, held <= energy * held[-1]]
    projection: Tensor = null @ null.t()
    return projection


def main_directions(main: Tensor, rest: Tensor, energy: float) -> Tensor:
    """The rows of `main [n, D]` that are protected, scaled to length 1; the others are zero. Those
    are the rows that, together with `rest`, hold no more than the share `energy` of the total.

    Args:
        main: orthogonal rows by rising energy, which is their squared length.
        rest: the energy outside of their span.

    >>> main_directions(torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.tensor(0.1), energy=0.3)
    tensor([[0., 0.],
            [1., 0.]], dtype=torch.float64)
    """
    energies = main.double().square().sum(1)
    noise = torch.finfo(torch.float32).eps * energies.sum()
    known = torch.where(energies > noise, energies, 0)
    held = rest + known.cumsum(0)
    protected = (held > energy * held[-1]) & (known > 0)
    return torch.where(protected, energies.clamp(min=noise).rsqrt(), 0)[:, None] * main


def packed(matrix: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix, in float32."""
    row, column = torch.triu_indices(*matrix.shape, device=matrix.device)
    return matrix[row, column].float()


def unpacked(triangle: Tensor) -> Tensor:
    """The inverse of `packed`.

    >>> unpacked(torch.tensor([1.0, 2.0, 3.0]))
    tensor([[1., 2.],
            [2., 3.]])
    """
    size = int((8 * len(triangle) + 1) ** 0.5 - 1) // 2
    row, column = torch.triu_indices(size, size, device=triangle.device)
    matrix = triangle.new_empty(size, size)
    matrix[row, column] = matrix[column, row] = triangle
    return matrix

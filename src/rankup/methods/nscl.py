"""Adam-NSCL: weights move only in directions in which old tasks have next to no inputs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankup import seeds
from rankup.errors import RankupError
from rankup.layers import CONVOLUTIONS
from rankup.methods.base import Setting
from rankup.methods.options import NsclOptions
from rankup.methods.shared.dense import DenseMethod
from rankup.methods.shared.layout import Layout, Layouts
from rankup.training.batches import Feed
from rankup.training.engine.eager import exact
from rankup.training.engine.learner import Learner
from rankup.training.engine.module import ModuleLearner

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d

_BYTES = 2**27  # for the layer inputs multiplied at once
_WIDE = 4096  # inputs from which on a layer's covariance is too large to keep
_MAIN = 1024  # directions that are kept in its place
_REST = ".rest"  # suffix to a layer's name: the energy of all other directions


class NSCL(DenseMethod):
    """Wang et al. (2021), *Training Networks in Null Space of Feature Covariance for Continual
    Learning*: every step of the optimiser, not its gradient, is projected onto the directions in
    which the inputs of each layer, over all tasks so far, have the least energy.

    A bias is the weight of an input that is always 1, and protected as such. The authors take the
    eigenvectors whose eigenvalues are below a multiple of the smallest, and look at the share of
    energy that these hold; here that share is given, so that it means the same for every layer.
    Directions that hold nothing are always free. The authors' code also divides a projection by its
    norm, which lowers the rate where there is more room: here the rate is the recipe's.

    The weights, the heads and half of each symmetric covariance are stored, the latter as a sum
    over samples, so that no count is needed. A layer with thousands of inputs, such as the first of
    an MLP on large images, keeps the 1,024 directions with the most energy instead, and the total
    energy of all others, which are free.

    Each task has norms of its own, so that everything that is shared is projected; the authors
    share theirs, under a penalty.
    """

    norms = "per task"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.options = setting.options_of(NsclOptions)
        self.layers = {
            name: layer
            for name, layer in self.body.named_modules()
            if isinstance(layer, nn.Linear)
            or (isinstance(layer, CONVOLUTIONS) and layer.groups == 1)
        }
        covered = {
            id(p) for layer in (*self.layers.values(), *self.parts) for p in layer.parameters()
        }
        others = [name for name, p in self.body.named_parameters() if id(p) not in covered]
        if others:
            raise RankupError(
                "nscl protects only Linear layers and convolutions without groups, but the network "
                f"also has {', '.join(others)}"
            )
        whose: dict[int, str] = {}
        for name, layer in self.layers.items():
            if (other := whose.setdefault(id(layer.weight), name)) != name:
                raise RankupError(
                    "nscl moves a weight only where its layer's inputs leave room, but "
                    f"{other} and {name} share one"
                )
            width = as_matrix(layer).shape[1]
            if width < _WIDE:
                self.kept[name] = torch.zeros(width * (width + 1) // 2, device=self.device)
            else:
                self.kept[name] = torch.zeros(_MAIN, width, device=self.device)
                self.kept[name + _REST] = torch.zeros((), device=self.device)

    def learner(self, feed: Feed) -> Learner:
        if not self.learned:
            return super().learner(feed)
        confined = [Confined(layer, self._free(name)) for name, layer in self.layers.items()]
        return ConfinedLearner(self.body, feed, self.learned, nn.ModuleList(confined))

    def _free(self, name: str) -> Free:
        kept, energy = self.kept[name], self.options.energy
        if kept.dim() == 1:
            return Within(null_space(unpacked(kept), energy))
        return Without(main_directions(kept, self.kept[name + _REST], energy))

    def consolidate(self, feed: Feed) -> None:
        """Add each layer's inputs for the task. Norms use batch statistics here, so batches are
        large and shuffled."""
        sums = {name: unpacked(t).double() for name, t in self.kept.items() if t.dim() == 1}
        kept = {name: t.clone() for name, t in self.kept.items() if name not in sums}

        def look(name: str, layer: Layer, given: tuple[Tensor]) -> None:
            if name in sums:
                add_covariance(sums[name], layer, *given)
            else:
                add_directions(kept[name], kept[name + _REST], layer, *given)

        x, _ = next(feed.train(2))
        self.predict(x, self.learned)  # a trial of the layout, if it is due, must not be counted
        hooks = [
            layer.register_forward_pre_hook(partial(look, name))
            for name, layer in self.layers.items()
        ]
        try:
            draw = seeds.generator(self.seed, "covariance", self.learned)
            with torch.no_grad():
                for x in feed.sample(len(feed), draw):
                    self.predict(x, self.learned)
        finally:
            for hook in hooks:
                hook.remove()
        self.kept = kept | {name: packed(total) for name, total in sums.items()}

    def kept_layouts(self, learned: int) -> Layouts:
        return {
            f"kept/{name}": Layout.like(t, least=0 if name.endswith(_REST) else -math.inf)
            for name, t in self.kept.items()
        }


class Free(nn.Module, ABC):
    """The projection onto a subspace of a layer's inputs."""

    @abstractmethod
    def forward(self, moves: Tensor) -> Tensor:
        """Rows `[out, in + 1]`, projected."""


class Within(Free):
    projection: Tensor  # [in + 1, in + 1]

    def __init__(self, projection: Tensor) -> None:
        super().__init__()
        self.register_buffer("projection", projection)

    def forward(self, moves: Tensor) -> Tensor:
        return moves @ self.projection


class Without(Free):
    """Onto the orthogonal complement of a few directions, given as rows of length 1 or 0."""

    directions: Tensor  # [n, in + 1]

    def __init__(self, directions: Tensor) -> None:
        super().__init__()
        self.register_buffer("directions", directions)

    def forward(self, moves: Tensor) -> Tensor:
        return moves - moves @ self.directions.t() @ self.directions


class Confined(nn.Module):
    """A layer whose weights may move only within a subspace of its inputs."""

    start: Tensor  # [out, in + 1]

    def __init__(self, layer: Layer, free: Free) -> None:
        super().__init__()
        self._layer = [layer]  # in a list, or its tensors would be registered twice
        self.register_buffer("start", as_matrix(layer).clone())
        self.free = free.to(self.start)

    def after_step(self) -> None:
        """Project the total move, which is the same as projecting each step, as a projection is
        linear and idempotent; rounding errors do not accumulate."""
        (layer,) = self._layer
        matrix = self.start + self.free(as_matrix(layer) - self.start)
        inputs = layer.weight[0].numel()
        layer.weight.copy_(matrix[:, :inputs].view_as(layer.weight))
        if layer.bias is not None:
            layer.bias.copy_(matrix[:, inputs])


class ConfinedLearner(ModuleLearner):
    confined: nn.ModuleList

    def __init__(self, body: nn.Module, feed: Feed, index: int, confined: nn.ModuleList) -> None:
        super().__init__(body, feed, index)
        self.register_input("confined", confined)

    def after_step(self) -> None:
        with torch.no_grad(), exact():
            for layer in self.confined:
                assert isinstance(layer, Confined)
                layer.after_step()


def as_matrix(layer: Layer) -> Tensor:
    """`[out, in]`: a kernel's taps count as inputs, and a bias is the weight of one more."""
    weight = layer.weight.detach().flatten(1)
    return weight if layer.bias is None else torch.cat([weight, layer.bias.detach()[:, None]], 1)


def inputs(layer: Layer, x: Tensor) -> Tensor:
    """The vectors that `as_matrix` multiplies, a row for each output position."""
    if not isinstance(layer, nn.Linear):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x = F.pad(x, layer._reversed_padding_repeated_twice, mode)
        dims = range(len(layer.kernel_size))
        for dim in dims:  # each spatial dim adds a last one for its taps: [B, C, places…, taps…]
            taps, apart = layer.kernel_size[dim], layer.dilation[dim]
            x = x.unfold(2 + dim, (taps - 1) * apart + 1, layer.stride[dim])[..., ::apart]
        x = x.movedim(1, 1 + len(dims)).flatten(1 + len(dims))
    rows = x.flatten(0, -2)
    return rows if layer.bias is None else F.pad(rows, (0, 1), value=1.0)


def add_covariance(total: Tensor, layer: Layer, x: Tensor) -> None:
    """Add Σ vvᵀ over the layer's inputs v, not centred; in float64, because the directions that
    matter are those that hold little compared with others."""
    for chunk in _parts(layer, x):
        rows = inputs(layer, chunk).double()
        total.addmm_(rows.t(), rows)


def _parts(layer: Layer, x: Tensor) -> Sequence[Tensor]:
    """Parts so small that the layer's inputs fit in memory: a convolution has many per sample."""
    taps = layer.weight[0, 0].numel()
    return torch.split(x, max(1, _BYTES // (8 * taps * x[0].numel())))


def null_space(covariance: Tensor, energy: float) -> Tensor:
    """The projection onto the eigenvectors with the smallest eigenvalues that together hold no more
    than a share of all energy.

    >>> null_space(torch.tensor([[9.0, 0.0, 0.0], [0.0, 0.9, 0.0], [0.0, 0.0, 0.1]]), 0.05).diag()
    tensor([0., 0., 1.], dtype=torch.float64)
    """
    values, vectors = torch.linalg.eigh(covariance.double())
    noise = torch.finfo(torch.float32).eps * values.sum()  # as covariances are stored in float32
    held = torch.where(values > noise, values, 0).cumsum(0)
    null = vectors[:, held <= energy * held[-1]]
    projection: Tensor = null @ null.t()
    return projection


def add_directions(main: Tensor, rest: Tensor, layer: Layer, x: Tensor) -> None:
    """Add Σ vvᵀ over the layer's inputs v to a sum that is kept as `mainᵀ main` with orthogonal
    rows; the energy that does not fit into them is added to `rest`."""
    for chunk in _parts(layer, x):
        for new in torch.split(inputs(layer, chunk), len(main)):
            rows = torch.cat([main, new]).double()
            energies, vectors = torch.linalg.eigh(rows @ rows.t())  # by rising energy
            main.copy_(vectors[:, -len(main) :].t() @ rows)
            rest += energies[: -len(main)].clamp(min=0).sum()


def main_directions(main: Tensor, rest: Tensor, energy: float) -> Tensor:
    """The rows of `main` scaled to length 1; to 0 those that, together with all that `main` leaves
    out, hold no more than a share of the total energy.

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

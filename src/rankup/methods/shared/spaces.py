"""The base of methods that measure the spaces which layers' inputs span, and move weights only
outside of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankup import seeds
from rankup.errors import RankupError
from rankup.layers import CONVOLUTIONS, Tensors
from rankup.methods.base import Setting
from rankup.methods.shared.dense import DenseMethod
from rankup.training.batches import Feed
from rankup.training.engine.eager import exact
from rankup.training.engine.module import ModuleLearner

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d

BYTES = 2**27  # of layer inputs that are multiplied at once
WIDE = 4096  # number of inputs from which on a layer's covariance is too large to store
MAIN = 1024  # number of main directions that are stored in its place


class ConfinedMethod(DenseMethod):
    """A method that moves shared weights only in directions in which earlier tasks have few inputs.

    A bias is protected as the weight of an input that is always 1. Norms are per task, so that all
    shared parameters are protected.

    Attributes:
        layers: the Linears and convolutions that tasks share, by name.
        widths: the number of their inputs, with that of the bias, by name.
    """

    norms = "per task"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        who = type(self).__name__.lower()
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
                f"{who} protects only Linear layers and convolutions without groups, but the "
                f"network also has {', '.join(others)}"
            )
        whose: dict[int, str] = {}
        for name, layer in self.layers.items():
            if (other := whose.setdefault(id(layer.weight), name)) != name:
                raise RankupError(
                    f"{who} moves a weight only where its layer's inputs leave room, but "
                    f"{other} and {name} share one"
                )
        self.widths = {name: as_matrix(layer).shape[1] for name, layer in self.layers.items()}

    def add_inputs(self, feed: Feed, most: int, draw: str, sums: Tensors, rests: Tensors) -> None:
        """Add the inputs that layers have for samples of the open task to `sums`, in place. Norms
        use batch statistics here, so batches are large and shuffled.

        Args:
            most: the largest number of samples.
            draw: a name for the random choice of samples.
            sums: for each layer its covariance `[D, D]` or, if it is in `rests`, main directions
                `[MAIN, D]`.
            rests: the energy outside of the main directions.
        """

        def look(name: str, layer: Layer, given: tuple[Tensor]) -> None:
            if name in rests:
                add_directions(sums[name], rests[name], layer, *given)
            else:
                add_covariance(sums[name], layer, *given)

        x, _ = next(feed.train(2))
        self.predict(x, self.learned)  # may try memory formats, whose inputs must not be counted
        hooks = [
            layer.register_forward_pre_hook(partial(look, name))
            for name, layer in self.layers.items()
        ]
        try:
            with torch.no_grad():
                for x in feed.sample(most, seeds.generator(self.seed, draw, self.learned)):
                    self.predict(x, self.learned)
        finally:
            for hook in hooks:
                hook.remove()


class Free(nn.Module, ABC):
    """The projection onto a subspace of a layer's inputs."""

    @abstractmethod
    def forward(self, moves: Tensor) -> Tensor:
        """Rows `[out, in + 1]`, projected."""


class Within(Free):
    """Given by its matrix."""

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
    """Lets the weights of a layer move only within a subspace of its inputs.

    Attributes:
        start: the layer as a matrix when the task began.
        free: the projection onto the subspace.
    """

    start: Tensor  # [out, in + 1]

    def __init__(self, layer: Layer, free: Free) -> None:
        super().__init__()
        self._layer = [layer]  # in a list, or its tensors would be registered twice
        self.register_buffer("start", as_matrix(layer).clone())
        self.free = free.to(self.start)

    def after_step(self) -> None:
        """Project the total move since the task began. As projections are linear and idempotent,
        that is the same as projecting each step, but rounding errors do not accumulate."""
        (layer,) = self._layer
        matrix = self.start + self.free(as_matrix(layer) - self.start)
        inputs = layer.weight[0].numel()
        layer.weight.copy_(matrix[:, :inputs].view_as(layer.weight))
        if layer.bias is not None:
            layer.bias.copy_(matrix[:, inputs])


class ConfinedLearner(ModuleLearner):
    """Learns a module whose layers are confined.

    Args:
        confined: `Confined` layers.
    """

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
    """`[out, in]`: a layer's weight. The taps of a kernel count as inputs; a bias is one more
    column."""
    weight = layer.weight.detach().flatten(1)
    return weight if layer.bias is None else torch.cat([weight, layer.bias.detach()[:, None]], 1)


def inputs(layer: Layer, x: Tensor) -> Tensor:
    """`[N, in]`: the vectors that `as_matrix` multiplies, a row for each output position."""
    if not isinstance(layer, nn.Linear):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x = F.pad(x, layer._reversed_padding_repeated_twice, mode)
        dims = range(len(layer.kernel_size))
        for dim in dims:  # unfolding appends a dim for the taps: [B, C, positions…, taps…]
            taps, apart = layer.kernel_size[dim], layer.dilation[dim]
            x = x.unfold(2 + dim, (taps - 1) * apart + 1, layer.stride[dim])[..., ::apart]
        x = x.movedim(1, 1 + len(dims)).flatten(1 + len(dims))
    rows = x.flatten(0, -2)
    return rows if layer.bias is None else F.pad(rows, (0, 1), value=1.0)


def add_covariance(total: Tensor, layer: Layer, x: Tensor) -> None:
    """Add Σ vvᵀ over the layer's inputs v, not centred, to `total [in, in]`. It is in float64,
    because the directions that matter have little energy compared with others."""
    for chunk in in_parts(layer, x):
        rows = inputs(layer, chunk).double()
        total.addmm_(rows.t(), rows)


def in_parts(layer: Layer, x: Tensor) -> Sequence[Tensor]:
    """Split inputs `[B, …]` so that the vectors of each part take at most `BYTES`."""
    taps = layer.weight[0, 0].numel()
    return torch.split(x, max(1, BYTES // (8 * taps * x[0].numel())))


def add_directions(main: Tensor, rest: Tensor, layer: Layer, x: Tensor) -> None:
    """Add Σ vvᵀ over the layer's inputs v to a sum that is stored as `mainᵀ main`, where
    `main [n, in]` has orthogonal rows, the sum's leading directions. The energy of all others is
    added to `rest`."""
    for chunk in in_parts(layer, x):
        for new in torch.split(inputs(layer, chunk), len(main)):
            rows = torch.cat([main, new]).double()
            energies, vectors = torch.linalg.eigh(rows @ rows.t())  # by rising energy
            main.copy_(vectors[:, -len(main) :].t() @ rows)
            rest += energies[: -len(main)].clamp(min=0).sum()

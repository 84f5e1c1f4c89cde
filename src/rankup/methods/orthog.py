"""Orthog-Subspace (Chaudhry et al., *Continual Learning in Low-rank Orthogonal Subspaces*, NeurIPS
2020): each task sees the features φ of the last hidden layer through a projection of its own,

    P_t φ(x),   P_s P_t = 0 for s ≠ t,

so that gradients of different tasks are orthogonal in that layer. Weights that are kept orthonormal
by steps along the Stiefel manifold preserve this in earlier layers. The rest is experience replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rankup import seeds
from rankup.errors import RankupError
from rankup.growing.planner import make_plan
from rankup.growing.trace import trace
from rankup.layers import CONVOLUTIONS, active_task
from rankup.layers.spec import HeadSpec
from rankup.layers.tensors import over_last
from rankup.methods.base import Setting
from rankup.methods.er_ring import ERRing, ERRingLearner
from rankup.methods.options import OrthogOptions
from rankup.training.batches import Draws, Feed
from rankup.training.engine.eager import exact
from rankup.training.engine.learner import Learner
from rankup.training.memory_format import convolves

# Of Newton and Schulz. Enough if the largest singular value of a step is at most 10 (those of the
# weight are 1); a larger one leaves the weight far from orthonormal. It is largest if all rows of a
# step are parallel: their length times the root of their number. At usual rates it is far smaller.
_ITERATIONS = 10


class Subspaces:
    """Orthogonal subspaces of equal dimension, one for each task: each is spanned by a block of
    columns of an orthogonal matrix, or of the identity.

    Attributes:
        masks: `[T, width]`, which columns each task has.
        basis: `[width, width]`, the orthogonal matrix; None for the identity.
    """

    def __init__(
        self, width: int, tasks: int, basis: str, draw: torch.Generator, place: dict[str, Any]
    ) -> None:
        owner = torch.arange(width) // (width // tasks)  # leftover columns belong to no task
        self.masks = (owner == torch.arange(tasks)[:, None]).to(**place)  # [T, width]
        self.basis: Tensor | None = None
        if basis == "orthogonal":
            # In double precision, so that rounding hides differences between machines.
            drawn = torch.empty(width, width, dtype=torch.float64)
            self.basis = nn.init.orthogonal_(drawn, generator=draw).to(**place)

    def project(self, x: Tensor) -> Tensor:
        """`x [B, …, width]`, each sample projected to the subspace of its own task."""
        task = active_task()
        assert task is not None
        if isinstance(task, Tensor):
            mask = over_last(self.masks.index_select(0, task), x)
        else:
            mask = self.masks[task]
        if self.basis is None:
            return x * mask
        with torch.autocast(x.device.type, enabled=False):
            return (x.to(mask.dtype) @ self.basis * mask) @ self.basis.t()


class OrthogLearner(ERRingLearner):
    """Keeps weights orthonormal by steps along the Stiefel manifold: gradients are projected onto
    its tangent space, and after the step each weight is replaced by the nearest orthonormal one.

    Attributes:
        orthonormal: the names of these weights.
    """

    orthonormal: Sequence[str] = ()

    def gradient(self, draw: Draws) -> tuple[Tensor, Sequence[Tensor]]:
        loss, grads = super().gradient(draw)
        by_name = dict(zip(self.learned(), grads, strict=True))
        with torch.no_grad(), exact():
            for name in self.orthonormal:
                by_name[name] = tangent(self.get_parameter(name).data, by_name[name])
        return loss, list(by_name.values())

    def after_step(self) -> None:
        by_size: dict[int, list[Tensor]] = {}
        for name in self.orthonormal:
            matrix = _matrix(self.get_parameter(name).data)
            by_size.setdefault(len(matrix), []).append(matrix)
        with torch.no_grad(), exact():
            for matrices in by_size.values():
                grams = torch.stack([matrix @ matrix.t() for matrix in matrices])
                for matrix, root in zip(matrices, inverse_roots(grams), strict=True):
                    matrix.copy_(root @ matrix)


class Orthog(ERRing):
    """Projections have rank ⌊width / T⌋; they are drawn from the seed and not stored. A ReLU
    follows them: the layer's own if the head reads nothing else, otherwise an extra one, for
    example behind a ResNet's average over positions.

    With `stiefel`, all weights but the heads are kept orthonormal, in their rows or their columns,
    whichever are fewer. By default this is done if there are convolutions, as the authors do.

    Replay is that of ER-Ring; as there, norms are shared and heads keep learning.
    """

    learner_class = OrthogLearner

    @classmethod
    def check(cls, setting: Setting) -> None:
        super().check(setting)
        specs = make_plan(setting.module, setting.grow_options).layers
        (width,) = (spec.inputs for spec in specs if isinstance(spec, HeadSpec))
        if width < len(setting.tasks):
            raise RankupError(
                "orthog gives each task a subspace of the last hidden layer, whose width must be "
                f"at least the number of tasks, {len(setting.tasks)}, got {width}"
            )
        if _stays_orthonormal(setting) and setting.recipe.optimiser != "sgd":
            raise RankupError(
                "orthog keeps weights orthonormal, so it needs the optimiser that follows the "
                f"gradient, sgd, not {setting.recipe.optimiser}; otherwise set stiefel to no"
            )

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        options = setting.options_of(OrthogOptions)
        head, draw = self.head, seeds.generator(self.seed, "subspaces")
        place = {"device": self.device, "dtype": head.dtype}
        width, tasks = head.spec.inputs, len(setting.tasks)
        self.subspaces = Subspaces(width, tasks, options.basis, draw, place)
        graph = trace(setting.module)
        before = graph.seen_through_relu(head.spec.name)
        if before is None:
            head.register_forward_pre_hook(self._project_inputs)
        else:
            self.body.get_submodule(before).register_forward_hook(self._project)
        self.orthonormal: list[str] = []
        if _stays_orthonormal(setting):
            self._make_orthonormal()

    def _make_orthonormal(self) -> None:
        # Frozen weights stay as given, and `named_parameters` lists a tied weight once.
        learned = {name for name, p in self.body.named_parameters() if p.requires_grad}
        for name, module in self.body.named_modules():
            is_layer = isinstance(module, (nn.Linear, *CONVOLUTIONS))  # heads are neither
            if is_layer and f"{name}.weight" in learned:
                drawn = torch.empty(module.weight.shape, dtype=torch.float64)
                nn.init.orthogonal_(drawn, generator=seeds.generator(self.seed, "stiefel", name))
                module.weight.data.copy_(drawn)
                self.orthonormal.append(f"{name}.weight")

    def learner(self, feed: Feed) -> Learner:
        learner = super().learner(feed)
        assert isinstance(learner, OrthogLearner)
        learner.orthonormal = [f"body.{name}" for name in self.orthonormal]
        return learner

    def consolidate(self, feed: Feed) -> None:
        if self.options.memory:
            super().consolidate(feed)

    def _project(self, _: nn.Module, __: Any, features: Tensor) -> Tensor:
        return self.subspaces.project(features)

    def _project_inputs(self, _: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return (torch.relu(self.subspaces.project(*inputs)),)


def _stays_orthonormal(setting: Setting) -> bool:
    asked = setting.options_of(OrthogOptions).stiefel
    return asked == "yes" or (asked == "auto" and convolves(setting.module))


def tangent(weight: Tensor, grad: Tensor) -> Tensor:
    """The component of a gradient in the tangent space of the manifold at `weight`, in the
    Euclidean metric. Both have the weight's shape."""
    W, G = _matrix(weight), _matrix(grad)
    across = G @ W.t()
    along = torch.addmm(G, across + across.t(), W, alpha=-0.5)
    return (along if len(grad) == len(along) else along.t()).reshape(grad.shape)


def inverse_roots(grams: Tensor) -> Tensor:
    """`G^(-1/2)` of matrices `[k, n, n]` whose eigenvalues are at least 1, as they are after a step
    in the tangent space. Uses the Newton–Schulz iteration, which needs only products."""
    # Eigenvalues are at most the largest row sum; scaled, they lie between 0 and 2, around 1.
    scale = 2 / (1 + grams.abs().sum(-1).amax(-1))[:, None, None]
    eye = torch.eye(grams.shape[-1], dtype=grams.dtype, device=grams.device).expand_as(grams)
    Y, Z, more = grams * scale, eye, 1.5 * eye
    for _ in range(_ITERATIONS):
        T = torch.baddbmm(more, Z, Y, alpha=-0.5)
        Y, Z = Y @ T, T @ Z
    return Z * scale.sqrt()


def _matrix(weight: Tensor) -> Tensor:
    """A weight as a matrix with at least as many columns as rows; a view if it is contiguous."""
    matrix = weight.flatten(1)
    return matrix if len(matrix) <= matrix.shape[1] else matrix.t()

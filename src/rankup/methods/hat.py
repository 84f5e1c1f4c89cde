"""Hard attention to the task (Serrà et al., *Overcoming Catastrophic Forgetting with Hard Attention
to the Task*, ICML 2018): every task learns which units it uses, and weights between units that
earlier tasks use are frozen.

The outputs h of a layer are multiplied by gates, one for each unit, which task t computes from an
embedding e_t that it learns:

    h' = a_t ⊙ h,   a_t = σ(s · e_t)

The slope s rises during every epoch from 1/s_max to s_max, so that gates become almost binary. A
regularisation term charges for gates of units that no earlier task uses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankup import seeds
from rankup.layers import TaskNorm, Tensors, active
from rankup.layers.spec import FactoredSpec
from rankup.layers.tensors import over_space
from rankup.methods.base import Setting
from rankup.methods.options import HatOptions
from rankup.methods.shared.bits import pack, packed_size, stray_bits, unpack
from rankup.methods.shared.guard import GuardedLearner, GuardedMethod
from rankup.methods.shared.layout import Layout, Layouts
from rankup.training.batches import Draws, Feed
from rankup.training.engine.learner import Learner
from rankup.utils.per_thread import PerThread, set_to
from rankup.utils.torch_modes import evaluating

_LARGEST_EMBEDDING = 6  # in absolute value
# Inputs with which `reached` finds out what the module does between its layers.
_PROBES = (math.nan, 1e4, -1e4, 1e-4, -1e-4)
_SATURATED = 50  # where the compensation of a gradient stops growing

_gates = PerThread[Tensors]()


def gated(gates: Tensors) -> AbstractContextManager[None]:
    """Inside, layers multiply their outputs by these gates, `[units]` by layer name."""
    return set_to(_gates, gates)


class HardAttention(GuardedMethod):
    """Gates come right after a layer; those of a convolution that only a batch norm reads come
    after the norm, which would turn zeros into something else. A learned task's gates are stored as
    bits.

    Norms are per task. Parameters that are neither gated nor per task are learned with the first
    task and constant after it.

    Attributes:
        units: the number of gates, those of all layers together.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        behind = dict(self.plan.folds)
        self.gated_parts = {
            spec.name: self.body.get_submodule(behind.get(spec.name, spec.name))
            for spec in self.layers
        }
        for spec in self.layers:
            self.gated_parts[spec.name].register_forward_hook(partial(_gate, spec))
        self.units = sum(spec.outputs for spec in self.layers)
        none = torch.zeros(0, packed_size(self.units), dtype=torch.uint8, device=self.device)
        self.kept["masks"] = none
        self._embedding: Tensor  # of the open task

    def learner(self, feed: Feed) -> Learner:
        options = self.setting.options_of(HatOptions)
        draw = seeds.generator(self.seed, "hat", self.learned)
        embedding = seeds.normal(self.units, generator=draw).to(self.device, self.plan.dtype)
        learner = HatLearner(self, feed, embedding, options)
        self._embedding = learner.embedding
        return learner

    def predict(self, x: Tensor, task: int) -> Tensor:
        with gated(self.split(self.mask(task))):
            return super().predict(x, task)

    def consolidate(self, feed: Feed) -> None:
        bits = pack(self.mask(self.learned).int(), 1)
        self.kept["masks"] = torch.cat([self.kept["masks"], bits[None]])

    def kept_layouts(self, learned: int) -> Layouts:
        wrong = partial(stray_bits, count=self.units)
        shape = learned, packed_size(self.units)
        return {"kept/masks": Layout(shape, torch.uint8, wrong=wrong)}

    def mask(self, task: int) -> Tensor:
        """`[units]`: which units a learned task uses or, for the open one, would use at its end."""
        masks = self.kept["masks"]
        if task < len(masks):
            return unpack(masks[task], 1, self.units).bool()
        return self._embedding.detach() > 0

    def claimed(self) -> Tensor:
        """`[units]`: which units any learned task uses."""
        none = torch.zeros(self.units, dtype=torch.bool, device=self.device)
        return torch.stack([none, *(self.mask(task) for task in range(self.learned))]).any(0)

    def split(self, units: Tensor) -> Tensors:
        """Split a tensor over all units into one per layer."""
        parts = torch.split(units, [spec.outputs for spec in self.layers])
        return {spec.name: mask for spec, mask in zip(self.layers, parts, strict=True)}

    def frozen(self, feed: Feed) -> Tensors:
        """Masks of the weights that learned tasks depend on, by the weights' names."""
        frozen, claimed = self.constant(), self.split(self.claimed())
        reached = self.reached(claimed, feed)
        for spec in self.layers:
            outputs, inputs = claimed[spec.name], reached[spec.name]
            weights = outputs[:, None] & inputs
            frozen[f"{spec.name}.weight"] = _over(spec, weights)
            if spec.bias:
                frozen[f"{spec.name}.bias"] = outputs
        return frozen

    def reached(self, claimed: Tensors, feed: Feed) -> Tensors:
        """Which inputs of each layer can be nonzero when only claimed units are in use.

        Found by running the module with every claimed unit at a probe value and all others at zero.
        NaN propagates through sums, ReLUs, means and most other operations, and stays out where all
        operands are zero. Comparisons, as in `torch.where`, may turn it into zeros, so large and
        small values of both signs are tried, too.
        """
        none: dict[str, Any] = {"dtype": torch.bool, "device": self.device}
        any_claimed = torch.stack([units.any() for units in claimed.values()]).any()
        reached = {
            spec.name: torch.zeros(spec.conv.channels if spec.conv else spec.inputs, **none)
            for spec in self.layers
        }

        def look(spec: FactoredSpec, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0]
            nonzero = (x != 0).movedim(-1 - spec.dims, 0).flatten(1).any(1)
            lost = ~x.isnan().any() & any_claimed & math.isnan(value)
            reached[spec.name] = nonzero | reached[spec.name] | lost

        def in_use(spec: FactoredSpec, layer: nn.Module, args: object, output: Tensor) -> Tensor:
            units = _over(spec, claimed[spec.name])
            return torch.zeros_like(output).masked_fill(units, value)

        def anything(layer: nn.Module, args: object, output: Tensor) -> Tensor:
            return torch.full_like(output, value)

        with ExitStack() as hooks:
            for part in self.parts:
                if isinstance(part, TaskNorm):  # has biases; its gate, if any, comes next
                    hooks.enter_context(part.register_forward_hook(anything))
            for spec in self.layers:
                layer, gated_part = self.body.get_submodule(spec.name), self.gated_parts[spec.name]
                hooks.enter_context(layer.register_forward_pre_hook(partial(look, spec)))
                hooks.enter_context(gated_part.register_forward_hook(partial(in_use, spec)))
            (x,) = feed.sample(2, torch.Generator())
            for value in _PROBES:
                with gated(claimed), torch.no_grad(), evaluating(self.body), active(self.learned):
                    self.body(torch.full_like(x, value) if x.is_floating_point() else x.clone())
        return reached


class HatLearner(GuardedLearner):
    """Learns the weights that are free, together with the embedding `[units]` of the gates."""

    unclaimed: Tensor

    def __init__(
        self, method: HardAttention, feed: Feed, embedding: Tensor, options: HatOptions
    ) -> None:
        super().__init__(method.body, feed, method.learned, method.frozen(feed))
        self.options, self.split = options, method.split
        self.embedding = nn.Parameter(embedding)
        self.register_input("unclaimed", (~method.claimed()).to(embedding.dtype))

    def learned(self) -> Tensors:
        return {"embedding": self.embedding, **super().learned()}

    def adopt(self, learned: Tensors) -> None:
        super().adopt(learned)
        self.embedding.data = learned["embedding"].detach()

    def sample_epoch(self, generator: torch.Generator) -> Draws:
        """The draws of an epoch, with the slope of the gates in each step."""
        steepest, steps = self.options.s_max, self.feed.steps_per_epoch
        # From the last step to the first, so that an epoch of a single step has the final slope.
        place: dict[str, Any] = {"device": generator.device, "dtype": torch.float32}
        slopes = torch.linspace(steepest, 1 / steepest, steps, **place)
        return super().sample_epoch(generator) | {"slope": slopes.flip(0)}

    def forward(self, draw: Draws) -> Tensor:
        """The loss, plus the strength times the mean gate of units that no learned task uses."""
        # A sigmoid whose derivative stays precise where its value is almost 1: `_compensation`
        # multiplies what is left of it by large numbers.
        gates = F.logsigmoid(draw["slope"] * self.embedding).exp()
        with gated(self.split(gates)):
            loss = super().forward(draw)
        price = (gates * self.unclaimed).sum() / self.unclaimed.sum().clamp(min=1)
        return loss + self.options.strength * price

    def gradient(self, draw: Draws) -> tuple[Tensor, Sequence[Tensor]]:
        loss, (by_embedding, *others) = super().gradient(draw)
        return loss, [by_embedding * self._compensation(draw["slope"]), *others]

    def after_step(self) -> None:
        super().after_step()
        self.embedding.detach().clamp_(-_LARGEST_EMBEDDING, _LARGEST_EMBEDDING)

    def _compensation(self, slope: Tensor) -> Tensor:
        """`[units]`: the factor by which gradients of the embedding are multiplied, so that gates
        learn as if they were sigmoids of slope 1 ("embedding gradient compensation")."""
        embedding = self.embedding.detach()
        steep = (slope * embedding).clamp(-_SATURATED, _SATURATED)
        return self.options.s_max / slope * (steep.cosh() + 1) / (embedding.cosh() + 1)


def _gate(spec: FactoredSpec, layer: nn.Module, args: object, output: Tensor) -> Tensor:
    return output * _over(spec, (_gates.value or {})[spec.name]).to(output.dtype)


def _over(spec: FactoredSpec, units: Tensor) -> Tensor:
    """Values per unit of a layer, shaped to broadcast over its outputs."""
    return over_space(units, spec.dims)

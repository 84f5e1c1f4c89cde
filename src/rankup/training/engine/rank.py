"""The learner of a grown network's open task. What does not change from step to step is computed
once, such as projections of the inputs by frozen factors; kernels of convolutions are built on side
streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rankup import kernels, seeds
from rankup.growing.supported import has_hooks
from rankup.layers import (
    LEARNING,
    FactoredConv,
    FactoredLayer,
    FactoredLinear,
    TaskLayer,
    TaskNorm,
    Tensors,
    active,
)
from rankup.layers.precomputed import Built, built, projected
from rankup.net.network import IncrementalNet
from rankup.training.batches import Draws, Feed, take
from rankup.training.distill import Teacher, divergence
from rankup.training.engine.module import ModuleLearner
from rankup.training.engine.padding import Padding
from rankup.training.memory_format import takes_channels_last, trial

if TYPE_CHECKING:
    from rankup.kernels.build import Builder

# Compiling a large network takes about a minute, and saves a quarter of every step after it.
_WORTH_COMPILING = 5e15
MOST_BYTES = 2**31  # limit for what is computed once from a task's inputs
_ROWS = 512  # samples that a CPU projects at once: few enough for its cache


def runs_as_traced(body: nn.Module, feed: Feed) -> bool:
    """Whether inputs go through traced layers alone: there are no hooks, and inputs are no indices
    of an embedding."""
    return not any(map(has_hooks, body.modules())) and feed.x.dtype != torch.int64


def _gets_raw_inputs(body: nn.Module, layer: nn.Module, feed: Feed, task: int) -> bool:
    """Whether a layer gets the module's inputs unchanged. Tried, because parts of the module that
    are not layers may have changed since it was traced."""
    x, _ = next(feed.train(2))
    inputs: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        trial(body, x, task)
    finally:
        hook.remove()
    return len(inputs) == 1 and torch.equal(inputs[0].flatten(1), x.flatten(1))


class RankLearner(ModuleLearner):
    """Learns the open task of a grown network.

    Args:
        pad: tables of frozen factors are padded to a multiple of this many rows: see `Padding`.
        teacher: a module whose answers are learned in place of labels.

    Attributes:
        projections: `[N, R]`, all training inputs projected by the first layer's frozen factors,
            with padding; None if they are not computed beforehand.
    """

    projections: Tensor | None
    teacher: Teacher | None
    was_tried = False  # whether the module is known to run as it was traced

    def __init__(
        self, net: IncrementalNet, feed: Feed, pad: int = 1, teacher: Teacher | None = None
    ) -> None:
        super().__init__(net.body, feed, len(net.tasks))
        self.active = LEARNING
        self.register_module("teacher", None)
        if teacher is not None:
            self.register_input("teacher", teacher)
        # The layer that reads the inputs, if they may be projected beforehand. It is in a list,
        # because as an attribute it would be registered as a submodule a second time.
        self._first = [
            layer
            for layer in net.parts
            if layer.spec.name == net.plan.first
            and isinstance(layer, FactoredLinear)
            and len(layer.old_U)
            and runs_as_traced(net.body, feed)
            and (self.was_tried or _gets_raw_inputs(net.body, layer, feed, self.index))
        ]
        # By submodule names, which for a stand-in of a parameter differ from `spec.name`.
        self._factored = {
            f"body.{name}": layer
            for name, layer in net.body.named_modules()
            if isinstance(layer, FactoredLayer)
        }
        self.padding = Padding(self._factored, pad)
        if self.index or net.options.base == "keep":
            self.mutated = ()  # after the first task, shared buffers are constant
        # `gradient` is overridden for convolutions only.
        self.replicas = "branches" if self._convolves or self.mutated else "vmap"
        self._builder: Builder | None = None
        self._masks: dict[str, str] = {}  # from a mask's name to that of the masked parameter
        # Kernels are built in channels-last format, which makes outputs channels-last, too.
        self._builds = self._convolves and self._takes_channels_last()
        self.register_buffer("projections", self._project())
        self._step_inputs |= self._padded_tables()
        if self.projections is not None:
            self._step_inputs["projections"] = self.projections

    def learned(self) -> Tensors:
        return self.padding.pad(super().learned())

    def adopt(self, learned: Tensors) -> None:
        super().adopt(self.padding.unpad(learned))

    def mask(self, masks: Tensors) -> None:
        """From the next step on, keep parameters of these names zero where their mask is False."""
        for number, (name, mask) in enumerate(self.padding.pad(masks).items()):
            self._masks[f"mask{number}"] = name
            self.register_input(f"mask{number}", mask.to(self.feed.dtype))
        self.replicas = "branches"

    @torch.no_grad()
    def after_step(self) -> None:
        for mask, name in self._masks.items():
            self.get_parameter(name).mul_(self.get_buffer(mask))

    def gradient(self, draw: Draws) -> tuple[Tensor, Sequence[Tensor]]:
        if self.is_compiled or not (self.side_streams and self._builds):
            return super().gradient(draw)
        with built(self._build_weights()):
            loss_and_gradients = super().gradient(draw)
        self.join()
        return loss_and_gradients

    @contextmanager
    def bound(self, tensors: Tensors) -> Iterator[None]:
        with super().bound(tensors):
            together = [layer for layer in self._convolutions() if layer.is_built_with_others]
            self._builder = None
            if (
                self.side_streams
                and self._is_bf16
                and together
                and self._builds
                and kernels.is_available()
            ):
                from rankup.kernels.build import Builder, Factors

                self._built_with_others = [layer.spec.name for layer in together]
                self._builder = Builder([Factors.of(layer) for layer in together])
            yield

    def _convolutions(self) -> list[FactoredConv]:
        return [layer for layer in self._factored.values() if isinstance(layer, FactoredConv)]

    def _takes_channels_last(self) -> bool:
        x = next(iter(self.feed.sample(2, seeds.generator(0, "layout"))))
        return takes_channels_last(self.body, x)

    def _build_weights(self) -> dict[str, Built]:
        """The kernels of all convolutions, built on side streams, because they depend on no data.
        Autograd uses the same streams, so their gradients do not hold up earlier layers."""
        main, weights = torch.cuda.current_stream(), dict[str, Built]()
        if self._builder is not None:
            with self.side_stream():
                tensors = self._builder()
                ready = torch.cuda.current_stream().record_event()
            named = zip(self._built_with_others, tensors, strict=True)
            weights = {name: Built(weight, ready) for name, weight in named}
        dtype = torch.bfloat16 if self._is_bf16 else self.feed.dtype
        others = [layer for layer in self._convolutions() if layer.spec.name not in weights]
        for number, layer in enumerate(others):
            with self.side_stream(number):
                weight = layer.build(dtype)
                ready = torch.cuda.current_stream().record_event()
            weight.record_stream(main)
            weights[layer.spec.name] = Built(weight, ready)
        return weights

    def forward(self, draw: Draws) -> Tensor:
        if self.teacher is None:
            return super().forward(draw)
        with active(self.active), self._autocast():
            x = self.inputs(draw)
            target = self.teacher(x.clone())  # either may change its input
            return divergence(self._answers(x, draw["rows"]), target, self.feed.recipe.softness)

    def logits(self, draw: Draws) -> Tensor:
        if self.projections is None:
            return super().logits(draw)
        rows, (first,) = draw["rows"], self._first
        if first.spec.rank.added(first.place):
            x = self.inputs(draw)
        else:  # Without new factors, the layer reads nothing of x but its shape.
            x = self.feed.scaled(self.feed.floats(self.x[:1])).expand(len(rows), *self.x.shape[1:])
        return self._answers(x, rows)

    def _answers(self, x: Tensor, rows: Tensor) -> Tensor:
        if self.projections is None:
            return self.answer(x)
        with projected(self._first[0].spec.name, take(self.projections, rows)):
            return self.answer(x)

    def _project(self) -> Tensor | None:
        """The training inputs projected by the first layer's frozen factors, `[N, R]`, if they are
        the same in every epoch and fit into memory."""
        inputs, feed = self.feed.fixed, self.feed
        if inputs is None or not self._first:
            return None
        (layer,) = self._first
        old, columns = len(layer.old_U), self.padding.rows(f"body.{layer.spec.name}")
        if (
            layer.base_weight is not None
            or inputs[0].numel() != layer.in_features
            or not 0 < layer.dtype.itemsize * columns * len(feed) <= MOST_BYTES
        ):
            return None
        projections = torch.zeros(len(feed), columns, dtype=layer.dtype, device=feed.device)
        with torch.no_grad():
            size, scale = _ROWS if inputs.is_cpu else feed.chunk_size(inputs), feed.byte_scale
            chunks = torch.split(inputs, size), torch.split(projections, size)
            for chunk, rows in zip(*chunks, strict=True):
                x = feed.scaled(feed.floats(chunk)) if scale is None else chunk.to(layer.dtype)
                rows[:, :old] = layer.project(x.flatten(1)).mul_(scale or 1)
        return projections

    def _padded_tables(self) -> Tensors:
        """The frozen factors and kept weights of all layers, as steps read them."""
        tables, owned = Tensors(), set[str]()
        for prefix, layer in self._factored.items():
            given = {key: layer.get_buffer(key) for key in layer.old_names}
            read = {key: self.padding.table(prefix, table) for key, table in given.items()}
            if layer.base_weight is not None:
                given["base_weight"] = read["base_weight"] = layer.base_weight
            if self._is_bf16 and layer.applies_kept_weight:  # cast once, not in every step
                read = {key: table.to(torch.bfloat16) for key, table in read.items()}
            tables |= {f"{prefix}.{key}": table for key, table in read.items()}
            owned |= {f"{prefix}.{key}" for key in read if read[key] is not given[key]}
        self.owned = frozenset(owned)
        return tables

    @property
    def gains_by_compiling(self) -> bool:  # type: ignore[override]
        """A rule of shapes and the number of steps. Networks with batch norms or convolutions have
        kernels of their own instead."""
        layers = [layer for layer in self.body.modules() if isinstance(layer, TaskLayer)]
        if any(isinstance(layer, TaskNorm) and layer.spec.is_batch for layer in layers):
            return False
        if not any(layer.applies_kept_weight for layer in self._factored.values()):
            return False
        steps = self.feed.recipe.epochs * self.feed.steps_per_epoch
        return steps * self._multiplications() > _WORTH_COMPILING

    def _multiplications(self) -> int:
        """The multiplications of one step's forward pass."""
        from torch.utils.flop_counter import FlopCounterMode

        x, _ = next(self.feed.train(2))
        with FlopCounterMode(display=False) as counter, self._autocast():
            trial(self.body, x, LEARNING)
        count: int = counter.get_total_flops() // 2
        return count * self.feed.batch_size // len(x)


class ApartLearner(RankLearner):
    """A learner that keeps the selectors over earlier tasks' factors at zero."""

    def __init__(
        self, net: IncrementalNet, feed: Feed, pad: int = 1, teacher: Teacher | None = None
    ) -> None:
        super().__init__(net, feed, pad, teacher)
        self.replicas = "branches"

    @torch.no_grad()
    def after_step(self) -> None:
        super().after_step()
        for layer in self._factored.values():
            layer.new_selector[layer.spec.rank.seeded : len(layer.old_U)] = 0

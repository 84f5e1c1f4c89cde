"""The learner of a grown network: inputs are projected by frozen factors once for all steps, and
weights of convolutions are built on side streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
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
from rankup.training.memory_format import takes_channels_last, trial

if TYPE_CHECKING:
    from rankup.kernels.build import Builder

# Compiling a large network takes about a minute, and saves a quarter of every step after it.
_WORTH_COMPILING = 5e15
MOST_BYTES = 2**31  # limit for what is computed once from a task's inputs
_ROWS = 512  # samples that a CPU projects at once: few enough for its cache


def runs_as_traced(body: nn.Module, feed: Feed) -> bool:
    """Whether nothing but the traced layers processes the inputs: no hooks, and no indices."""
    return not any(map(has_hooks, body.modules())) and feed.x.dtype != torch.int64


def _gets_raw_inputs(body: nn.Module, layer: nn.Module, feed: Feed, task: int) -> bool:
    """Whether a layer gets the module's inputs unchanged: since the module was traced, something
    that is not a layer may have changed."""
    x, _ = next(feed.train(2))
    inputs: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        trial(body, x, task)
    finally:
        hook.remove()
    return len(inputs) == 1 and torch.equal(inputs[0].flatten(1), x.flatten(1))


class RankLearner(ModuleLearner):
    """The task that a grown network has begun.

    Args:
        pad: fill the tables of frozen factors up to a multiple of this many rows with zeros, which
            change nothing and get no gradient. So tasks of different rank have the same shapes,
            and one captured graph serves them all.
        teacher: its answers are learned, in place of labels.
    """

    seen: Tensor | None
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
        # In lists, because the tensors of a module that is an attribute are listed twice.
        self._first = [
            layer
            for layer in net.parts
            if layer.spec.name == net.plan.first
            and isinstance(layer, FactoredLinear)
            and len(layer.old_U)
            and runs_as_traced(net.body, feed)
            and (self.was_tried or _gets_raw_inputs(net.body, layer, feed, self.index))
        ]
        # By the names that they have as modules: a parameter's differs from the parameter's own.
        self._factored = {
            f"body.{name}": layer
            for name, layer in net.body.named_modules()
            if isinstance(layer, FactoredLayer)
        }
        self._extra = {name: -len(layer.old_U) % pad for name, layer in self._factored.items()}
        if self.index or net.options.base == "keep":
            self.mutated = ()  # after the first task, shared buffers are constant
        # `gradient` is overridden for convolutions only.
        self.replicas = "branches" if self._convolves or self.mutated else "vmap"
        self._builder: Builder | None = None
        self._masks: dict[str, str] = {}  # by their names, those of what they are for
        # Weights that are built have their channels last, and so would their outputs.
        self._builds = self._convolves and self._takes_channels_last()
        self.register_buffer("seen", self._project())
        self._step_inputs |= self._padded_tables()
        if self.seen is not None:
            self._step_inputs["seen"] = self.seen

    def learned(self) -> Tensors:
        return self._padded(super().learned())

    def adopt(self, learned: Tensors) -> None:
        super().adopt(self.unpadded(learned))

    def _padded(self, tensors: Tensors) -> Tensors:
        """Tensors by the names of what is learned, those of selectors as long as padded tables."""
        padded = dict(tensors)
        for name, (old, extra) in self._spans():
            if name in tensors:
                selector = tensors[name].detach()
                padded[name] = torch.cat([F.pad(selector[:old], (0, extra)), selector[old:]])
        return padded

    def unpadded(self, tensors: Tensors) -> Tensors:
        """The inverse of this padding."""
        cut = dict(tensors)
        for name, (old, extra) in self._spans():
            if name in tensors:
                cut[name] = torch.cat([tensors[name][:old], tensors[name][old + extra :]])
        return cut

    def _spans(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Of each selector that is padded: where this begins, and how long it is."""
        for prefix, layer in self._factored.items():
            if extra := self._extra[prefix]:
                yield f"{prefix}.new_selector", (len(layer.old_U), extra)

    def keep(self, kept: Tensors) -> None:
        """From the next step on, what is learned under these names stays zero where `kept` is not
        one."""
        for number, (name, mask) in enumerate(self._padded(kept).items()):
            self._masks[f"kept{number}"] = name
            self.register_input(f"kept{number}", mask.to(self.feed.dtype))
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
        """The weights of all convolutions, which depend on no data, built on side streams. Autograd
        uses the same streams, so their gradients do not hold up the layers before them."""
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
        if self.seen is None:
            return super().logits(draw)
        rows, (first,) = draw["rows"], self._first
        if first.spec.rank.added(first.place):
            x = self.inputs(draw)
        else:  # Without new factors, the layer uses nothing but the projection.
            x = self.feed.scaled(self.feed.floats(self.x[:1])).expand(len(rows), *self.x.shape[1:])
        return self._answers(x, rows)

    def _answers(self, x: Tensor, rows: Tensor) -> Tensor:
        projection: AbstractContextManager[object] = nullcontext()
        if self.seen is not None:
            projection = projected(self._first[0].spec.name, take(self.seen, rows))
        with projection:
            return self.answer(x)

    def _project(self) -> Tensor | None:
        """The task's inputs projected by the frozen factors of the first layer, if they are the
        same in every epoch: computed once and not at every step."""
        inputs, feed = self.feed.fixed, self.feed
        if inputs is None or not self._first:
            return None
        (layer,) = self._first
        old = len(layer.old_U)
        columns = old + self._extra[f"body.{layer.spec.name}"]
        if (
            layer.base_weight is not None
            or inputs[0].numel() != layer.in_features
            or not 0 < layer.dtype.itemsize * columns * len(feed) <= MOST_BYTES
        ):
            return None
        seen = torch.zeros(len(feed), columns, dtype=layer.dtype, device=feed.device)
        with torch.no_grad():
            size, scale = _ROWS if inputs.is_cpu else feed.chunk_size(inputs), feed.byte_scale
            for chunk, rows in zip(torch.split(inputs, size), torch.split(seen, size), strict=True):
                x = feed.scaled(feed.floats(chunk)) if scale is None else chunk.to(layer.dtype)
                rows[:, :old] = layer.project(x.flatten(1)).mul_(scale or 1)
        return seen

    def _padded_tables(self) -> Tensors:
        tables, made = {}, set()
        for prefix, layer in self._factored.items():
            names = *layer.old_names, *(["base_weight"] if layer.base_weight is not None else [])
            for key in names:
                table = given = layer.get_buffer(key)
                if extra := self._extra[prefix] if key != "base_weight" else 0:
                    table = F.pad(table, (0, 0, 0, extra))
                if self._is_bf16 and layer.applies_kept_weight:
                    table = table.to(torch.bfloat16)  # once, not in every step
                tables[f"{prefix}.{key}"] = table
                if table is not given:
                    made.add(f"{prefix}.{key}")
        self.made = frozenset(made)
        return tables

    @property
    def gains_by_compiling(self) -> bool:  # type: ignore[override]
        """By a rule of shapes and numbers of steps. Batch norms and convolutions of factors have
        kernels of their own."""
        layers = [layer for layer in self.body.modules() if isinstance(layer, TaskLayer)]
        if any(isinstance(layer, TaskNorm) and layer.spec.is_batch for layer in layers):
            return False
        if not any(layer.applies_kept_weight for layer in self._factored.values()):
            return False
        steps = self.feed.recipe.epochs * self.feed.steps_per_epoch
        return steps * self._multiplications() > _WORTH_COMPILING

    def _multiplications(self) -> int:
        """Of one step's forward pass."""
        from torch.utils.flop_counter import FlopCounterMode

        x, _ = next(self.feed.train(2))
        with FlopCounterMode(display=False) as counter, self._autocast():
            trial(self.body, x, LEARNING)
        count: int = counter.get_total_flops() // 2
        return count * self.feed.batch_size // len(x)


class ApartLearner(RankLearner):
    """A learner whose selectors over earlier tasks' factors stay at zero."""

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

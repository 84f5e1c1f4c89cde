"""How a grown network learns a task, as the engine sees it: like any module, except that the data
is projected by frozen factors once, and kernels of convolutions are built aside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankup import kernels, seeds
from rankup.growing.supported import has_hooks
from rankup.layers import FactoredConv, FactoredLayer, FactoredLinear, Tensors, active
from rankup.layers.precomputed import Built, built, projected
from rankup.net.network import IncrementalNet
from rankup.training.batches import Draws, Feed, take
from rankup.training.distill import Teacher, divergence
from rankup.training.engine.module import ModuleLearner
from rankup.training.memory_format import takes_channels_last, trial

if TYPE_CHECKING:
    from rankup.kernels.build import Builder

MOST_BYTES = 2**31  # limit for what is computed once from a task's inputs
_ROWS = 512  # samples that a CPU projects at once: few enough for its cache


def runs_as_traced(body: nn.Module, feed: Feed) -> bool:
    """Whether only layers process the inputs: no hooks, and no indices, which a Linear cannot
    take."""
    return not any(map(has_hooks, body.modules())) and feed.x.dtype != torch.int64


def _reads_what_is_fed(body: nn.Module, layer: nn.Module, feed: Feed, task: int) -> bool:
    """Whether a layer still reads the inputs as they are: since the module was traced, something
    that is not a layer may have changed."""
    x, _ = next(feed.train(2))
    read: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    try:
        trial(body, x, task)
    finally:
        hook.remove()
    return len(read) == 1 and torch.equal(read[0].flatten(1), x.flatten(1))


class RankLearner(ModuleLearner):
    """The task that a grown network has begun.

    Args:
        pad: fill the tables of frozen factors up to a multiple of this many rows with zeros, which
            change nothing and get no gradient. So tasks of different rank have the same shapes,
            and one captured graph serves them all.
        teacher: already answers for the task; learned from in place of labels.
    """

    seen: Tensor | None
    teacher: Teacher | None
    was_tried = False  # whether it is known to run still as traced

    def __init__(
        self, net: IncrementalNet, feed: Feed, pad: int = 1, teacher: Teacher | None = None
    ) -> None:
        super().__init__(net.body, feed, len(net.tasks))
        self.register_module("teacher", None)
        if teacher is not None:
            self.register_input("teacher", teacher)
        # In lists, because the tensors of a module that is an attribute are listed twice.
        first = [part for part in net.parts if part.spec.name == net.plan.first]
        self._first = [
            part
            for part in first
            if isinstance(part, FactoredLinear)
            and len(part.U)
            and runs_as_traced(net.body, feed)
            and (self.was_tried or _reads_what_is_fed(net.body, part, feed, self.index))
        ]
        self._factored = {
            f"body.{part.spec.name}": part for part in net.parts if isinstance(part, FactoredLayer)
        }
        self._extra = {name: -len(layer.U) % pad for name, layer in self._factored.items()}
        if self.index or net.options.base == "keep":
            # After the first task, what is not factored stays as it is.
            self.mutated = ()
        # It has steps of its own only for convolutions.
        self.replicas = "branches" if self._convolves or self.mutated else "vmap"
        self._builder: Builder | None = None
        # Kernels that are built aside have their channels last, and so would their outputs.
        self._builds = self._convolves and self._takes_channels_last()
        self.register_buffer("seen", self._project())
        self._reads |= self._padded_tables()
        if self.seen is not None:
            self._reads["seen"] = self.seen

    def learned(self) -> Tensors:
        learned = super().learned()
        for prefix, layer in self._factored.items():
            name, old, extra = f"{prefix}.new_selector", len(layer.U), self._extra[prefix]
            if extra:
                selector = learned[name].detach()
                learned[name] = torch.cat([F.pad(selector[:old], (0, extra)), selector[old:]])
        return learned

    def adopt(self, learned: Tensors) -> None:
        super().adopt(learned)
        for prefix, layer in self._factored.items():
            old, extra = len(layer.U), self._extra[prefix]
            if extra:
                padded = layer.new_selector.data
                layer.new_selector.data = torch.cat([padded[:old], padded[old + extra :]])

    def gradient(self, draw: Draws) -> tuple[Tensor, Sequence[Tensor]]:
        if not (self.beside and self._builds):
            return super().gradient(draw)
        with built(self._build_aside()):
            answer = super().gradient(draw)
        self.join()
        return answer

    @contextmanager
    def bound(self, tensors: Tensors) -> Iterator[None]:
        with super().bound(tensors):
            together = [layer for layer in self._convolutions() if layer.is_built_with_others]
            self._builder = None
            if (
                self.beside
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
        some = next(iter(self.feed.sample(2, seeds.generator(0, "layout"))))
        return takes_channels_last(self.body, some)

    def _build_aside(self) -> dict[str, Built]:
        """All kernels, which depend on no data. Autograd uses the same streams: what is done with
        a kernel's gradient does not hold up the layers before it."""
        main, made = torch.cuda.current_stream(), dict[str, Built]()
        if self._builder is not None:
            with self.side_stream():
                found = self._builder()
                ready = torch.cuda.current_stream().record_event()
            named = zip(self._built_with_others, found, strict=True)
            made = {name: Built(kernel, ready) for name, kernel in named}
        dtype = torch.bfloat16 if self._is_bf16 else self.feed.dtype
        alone = [layer for layer in self._convolutions() if layer.spec.name not in made]
        for number, layer in enumerate(alone):
            with self.side_stream(number):
                kernel = layer.build(dtype)
                ready = torch.cuda.current_stream().record_event()
            kernel.record_stream(main)
            made[layer.spec.name] = Built(kernel, ready)
        return made

    def forward(self, draw: Draws) -> Tensor:
        if self.teacher is None:
            return super().forward(draw)
        with active(self.index), self._autocast():
            x = self.inputs(draw)
            wanted = self.teacher(x.clone())  # either may change its input
            return divergence(self._answers(x, draw["rows"]), wanted, self.feed.recipe.softness)

    def logits(self, draw: Draws) -> Tensor:
        if self.seen is None:
            return super().logits(draw)
        rows, (first,) = draw["rows"], self._first
        if first.spec.rank.added(self.index):
            x = self.inputs(draw)
        else:  # Without factors of its own, the layer reads nothing but the projection.
            x = self.feed.scaled(self.feed.floats(self.x[:1])).expand(len(rows), *self.x.shape[1:])
        return self._answers(x, rows)

    def _answers(self, x: Tensor, rows: Tensor) -> Tensor:
        own: AbstractContextManager[object] = nullcontext()
        if self.seen is not None:
            own = projected(self._first[0].spec.name, take(self.seen, rows))
        with own:
            logits: Tensor = self.body(x)
        return logits

    def _project(self) -> Tensor | None:
        """The task's inputs projected by the frozen factors of the first layer, if they are the
        same in every epoch: computed once and not at every step."""
        made, feed = self.feed.fixed, self.feed
        if made is None or not self._first:
            return None
        (layer,) = self._first
        old = len(layer.U)
        columns = old + self._extra[f"body.{layer.spec.name}"]
        if (
            layer.base_weight is not None
            or made[0].numel() != layer.in_features
            or not 0 < layer.dtype.itemsize * columns * len(feed) <= MOST_BYTES
        ):
            return None
        seen = torch.zeros(len(feed), columns, dtype=layer.dtype, device=feed.device)
        with torch.no_grad():
            size, scale = _ROWS if made.is_cpu else feed.chunk_size(made), feed.byte_scale
            for part, rows in zip(torch.split(made, size), torch.split(seen, size), strict=True):
                x = feed.scaled(feed.floats(part)) if scale is None else part.to(layer.dtype)
                rows[:, :old] = layer.project(x.flatten(1)).mul_(scale or 1)
        return seen

    def _padded_tables(self) -> Tensors:
        tables = {}
        for prefix, layer in self._factored.items():
            for key in ("U", "V"):
                table, extra = getattr(layer, key), self._extra[prefix]
                tables[f"{prefix}.{key}"] = F.pad(table, (0, 0, 0, extra)) if extra else table
            if layer.base_weight is not None:
                tables[f"{prefix}.base_weight"] = layer.base_weight
        return tables


class ApartLearner(RankLearner):
    """A learner whose selectors over earlier tasks' factors stay at zero, where they must start."""

    def __init__(
        self, net: IncrementalNet, feed: Feed, pad: int = 1, teacher: Teacher | None = None
    ) -> None:
        super().__init__(net, feed, pad, teacher)
        self.replicas = "branches"

    @torch.no_grad()
    def after_step(self) -> None:
        for layer in self._factored.values():
            layer.new_selector[layer.spec.rank.seeded : len(layer.U)] = 0

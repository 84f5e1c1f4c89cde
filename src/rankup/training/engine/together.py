"""The training steps of several tasks at once: one batch, one backward pass and one update."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rankup import seeds
from rankup.layers import Tensors
from rankup.training.batches import Draws
from rankup.training.engine.eager import matmul_precision
from rankup.training.engine.module import losses_of
from rankup.training.engine.per_task import PerTaskOptimiser
from rankup.training.engine.stacked import StackedBody, cut, lacking, stacked
from rankup.training.optim import flattened, views
from rankup.training.recipe import Recipe
from rankup.utils.torch_modes import evaluating

Batch = Callable[[Draws], tuple[Tensor, Tensor]]  # a step's samples, [A·b, …], and labels, [A·b]


class TogetherSteps:
    """The steps of A tasks that share a body, a batch and an update, and nothing else.

    Args:
        values: the tensors that each task starts with.
        classes: how many classes each has.
        recipes: each task's recipe.
        clip: the largest norm of a task's gradient.

    Attributes:
        totals: `[A]`, the sums of losses; the caller sets them to zero.
    """

    def __init__(
        self,
        body: StackedBody,
        values: Sequence[Tensors],
        classes: Sequence[int],
        recipes: Sequence[Recipe],
        *,
        clip: float | None = None,
    ) -> None:
        self.body, self.recipe = body, recipes[0]
        self.values, self.classes, self._widest = list(values), list(classes), max(classes)
        together = stacked(values)
        self.device = next(iter(together.values())).device
        self._like = {name: tensor[0] for name, tensor in together.items()}
        flat = flattened(together.values(), 1)  # [A, P]
        scales = body.autocast == torch.float16  # in which small gradients would be zero
        self.optimiser = PerTaskOptimiser(recipes, flat, clip, scales)
        self.totals = torch.zeros(len(flat), dtype=torch.float32, device=self.device)  # of losses
        self._begin()

    def learned(self, number: int) -> Tensors:
        """What a task has learned so far."""
        own = views(self.optimiser.state["flat"][number], self._like)
        return {k: t.clone() for k, t in cut(own, self.values[number]).items()}

    def keep(self, tasks: Sequence[int]) -> None:
        """Go on with these tasks alone."""
        self.values = [self.values[task] for task in tasks]
        self.classes = [self.classes[task] for task in tasks]
        self.optimiser.keep(tasks)
        self.totals = self.totals[list(tasks)]
        self._begin()

    def run(
        self, batch: Batch, draws: Draws, weights: Tensor, rates: Tensor, learns: Tensor, seed: int
    ) -> None:
        """Take a step for each entry of `draws`.

        Args:
            weights: `[A, b]`, 0 for what only fills up a task's part of the batch.
            rates: `[steps, A, 1]`.
            learns: `[A, 1]`, whether a task is still being learned.
            seed: for random operations of the module, such as dropout.
        """
        entries = [
            dict(zip(draws, entry, strict=True)) for entry in zip(*draws.values(), strict=True)
        ]
        with seeds.seeded_rng(self.device, seed), matmul_precision(self.recipe):
            for draw, lr in zip(entries, rates, strict=True):
                self._one(batch, draw | {"weights": weights, "lr": lr, "learns": learns})

    @torch.no_grad()
    def predict(self, number: int, x: Tensor) -> Tensor:
        """One task's logits with what it has learned so far."""
        self._hold()
        one = slice(number, number + 1)
        leaves = {name: leaf[one] for name, leaf in self._leaves.items()}
        self.body.hold(leaves, {name: missing[one] for name, missing in self._missing.items()})
        try:
            with evaluating(self.body.module):
                return self.body(x)[:, : self.classes[number]]
        finally:
            self.body.hold(self._leaves, self._missing)

    def _begin(self) -> None:
        self._missing = lacking(self.classes, self._widest, self.device)
        self._hold()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._static: Tensors = {}
        self._captures = self.device.type == "cuda"

    def _hold(self) -> None:
        """Let the body run on the current parameters. Under autocast they are cast here, all at
        once, and not in each layer."""
        flat = self.optimiser.state["flat"].to(self.body.autocast or self.body.dtype)
        leaves = views(flat, self._like)
        self._leaves = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
        self.body.hold(self._leaves, self._missing)

    def _one(self, batch: Batch, inputs: Tensors) -> None:
        if self._captures and self._graph is None:
            self._capture(batch, inputs)
        if self._graph is None:
            self._step(batch, inputs)
            return
        for name, tensor in inputs.items():
            self._static[name].copy_(tensor, non_blocking=True)
        self._graph.replay()

    def _step(self, batch: Batch, inputs: Tensors) -> None:
        weights, lr, learns = (inputs[name] for name in ("weights", "lr", "learns"))
        x, y = batch({k: t for k, t in inputs.items() if k not in ("weights", "lr", "learns")})
        if self.body.autocast is not None:
            self._hold()
        logits = self.body(x).to(self.optimiser.state["flat"].dtype)
        each = losses_of(self.recipe, logits, y).view(weights.shape)  # [A, b]
        losses = (each * weights).sum(1) / weights.sum(1)
        scaled = losses * self.optimiser.state["scale"][:, 0].to(losses.dtype)
        leaves = list(self._leaves.values())
        grads = torch.autograd.grad(scaled.sum(), leaves, materialize_grads=True)
        self.optimiser.step(flattened(grads, 1).to(losses.dtype), lr, learns)
        self.totals += losses.detach()

    def _capture(self, batch: Batch, inputs: Tensors) -> None:
        """Capture one step in a CUDA graph, or warn and go on without one. No task learns by it."""
        self._static = {name: tensor.clone() for name, tensor in inputs.items()}
        self._static["learns"].zero_()
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        graph, totals, before = torch.cuda.CUDAGraph(), self.totals.clone(), seeds.rng_states()
        try:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):  # libraries initialise in their first call
                    self._step(batch, self._static)
            torch.cuda.current_stream().wait_stream(stream)
            if seeds.rng_states() != before:  # a graph would repeat these in every step
                raise RuntimeError("the module draws random numbers on the CPU")
            with (
                seeds.rng_restored_on_error(self.device),
                torch.cuda.graph(graph, stream=stream),
            ):
                self._step(batch, self._static)
            self._graph = graph
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._captures = False
            reason = str(error).strip().splitlines()[0]
            warnings.warn(f"steps are not captured in a CUDA graph: {reason}", stacklevel=2)
        self.totals.copy_(totals)

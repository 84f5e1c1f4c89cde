"""Running steps by a CUDA graph, which is captured once and replayed."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from contextlib import ExitStack
from itertools import cycle, islice

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from rankup import kernels, seeds
from rankup.layers import Tensors
from rankup.training.batches import Draws
from rankup.training.engine.eager import Steps, matmul_precision
from rankup.training.engine.learner import Form, Learner
from rankup.training.optim import PerReplica, aligned_size, flattened, make_optimiser, views

_SIDE_STREAMS = 2  # of each learner
_POOL = 32  # streams that torch has per device


class Graph(Steps):
    """One step of all learners, captured in a CUDA graph and replayed.

    The graph works on tensors of its own, into which those of the learners are copied, so it serves
    all later tasks whose tensors have the same shapes.

    Args:
        form: how the graph runs several learners: see `Learner.replicas`.
        signature: what must be equal for a graph to serve other learners.
        compiled: whether learners compile their modules before.
    """

    def __init__(
        self,
        form: Form,
        learners: Sequence[Learner],
        signature: Hashable,
        compiled: bool = False,
    ) -> None:
        self.form, self.signature, self.compiled = form, signature, compiled
        # A replay runs the steps of the captured learners, on the values of those that are started.
        self.captured = self.learners = learners
        self.device = learners[0].feed.device
        try:
            self._allocate()
            self._capture()
        except BaseException:
            for learner in learners:  # eager steps use no streams
                learner.drop_side_streams()
            raise

    def start(self, learners: Sequence[Learner]) -> None:
        """Copy the tensors of learners that are about to begin."""
        self.learners = learners
        for number, learner in enumerate(learners):
            for name, tensor in (learner.step_inputs() | learner.learned()).items():
                self.tensors[number][name].copy_(tensor.detach())
        self.optimiser.restart()

    def epoch(self, draws: Sequence[Draws], rates: Sequence[Sequence[float]], seed: int) -> Tensor:
        for buffers, tensors in zip(self.draws, draws, strict=True):
            for name, entries in tensors.items():
                buffers[name].copy_(entries)
        self.rates.copy_(torch.tensor(rates).t(), non_blocking=True)
        self.now.zero_()
        self.total.zero_()
        with seeds.seeded_rng(self.device, seed):
            for _ in rates[0]:
                self.graph.replay()
        return self.total.clone()

    def state(self, number: int) -> Tensors:
        tensors = self.tensors[number]
        return self.optimiser.state(number) | {
            f"buffer/{name}": tensors[name] for name in self.captured[number].mutated
        }

    def adopt(self) -> None:
        for number, learner in enumerate(self.learners):
            tensors = self.tensors[number]
            learner.adopt({name: tensors[name] for name in learner.learned()})
            for name in learner.mutated:
                learner.step_inputs()[name].copy_(tensors[name])

    def _allocate(self) -> None:
        generator = torch.Generator(self.device).manual_seed(0)
        learned = [learner.learned() for learner in self.learners]
        count = sum(aligned_size(tensor) for tensor in learned[0].values())
        flat = torch.zeros(len(learned), count, device=self.device, dtype=_dtype(learned[0]))
        recipes = [learner.feed.recipe for learner in self.learners]
        alike = len(set(recipes)) == 1
        self.optimiser = make_optimiser(recipes[0], flat) if alike else PerReplica(recipes, flat)
        self.grad = torch.empty_like(flat)
        inputs = [learner.step_inputs() for learner in self.learners]
        draws = [learner.sample_epoch(generator) for learner in self.learners]
        # For branches each learner has its own tensors; otherwise those of all are stacked. Either
        # way `tensors` and `draws` hold each learner's own, as slices if they are stacked.
        if self.form == "branches":
            pairs = zip(inputs, self.learners, strict=True)
            self.tensors = [_copies(tensors, learner.owned) for tensors, learner in pairs]
            self.draws = [_copies(tensors) for tensors in draws]
        else:
            self.stacked, self.tensors = _stacked(inputs)
            self.stacked_draws, self.draws = _stacked(draws)
            self.stacked |= views(flat, learned[0])
        for number, tensors in enumerate(self.tensors):
            tensors |= views(flat[number], learned[number])
        self.now = torch.zeros(1, dtype=torch.long, device=self.device)  # the step of the epoch
        steps = self.learners[0].feed.steps_per_epoch
        self.rates = torch.zeros(steps, len(learned), device=self.device, dtype=torch.float32)
        self.total = flat.new_zeros(len(learned))

    def _capture(self) -> None:
        count = len(self.captured)
        main, *others = _streams((1 + _SIDE_STREAMS) * count + 1, self.device)
        self.streams = others[:count]
        for number, learner in enumerate(self.captured):
            learner.side_streams = others[count + number :: count]
        self.graph = torch.cuda.CUDAGraph()
        with ExitStack() as stack:
            stack.enter_context(matmul_precision(self.captured[0].feed.recipe))
            stack.enter_context(torch.cuda.device(self.device))
            if self.form == "stacked":
                stack.enter_context(self.captured[0].bound(self.stacked))
            elif self.form == "branches":
                for learner, tensors in zip(self.captured, self.tensors, strict=True):
                    stack.enter_context(learner.bound(tensors))
                if self.compiled:
                    for learner in self.captured:
                        learner.compile_module()
                else:
                    stack.enter_context(kernels.in_use())
            main.wait_stream(torch.cuda.current_stream())
            before = seeds.rng_states()
            with torch.cuda.stream(main):  # libraries initialise in their first call
                for _ in range(2):
                    self.now.zero_()
                    self._step()
            torch.cuda.current_stream().wait_stream(main)
            if seeds.rng_states() != before:  # a graph would repeat these in every step
                raise RuntimeError("the module draws random numbers on the CPU")
            with (
                seeds.rng_restored_on_error(self.device),
                torch.cuda.graph(self.graph, stream=main),
            ):
                self._step()

    def _step(self) -> None:
        lr = self.rates.index_select(0, self.now).squeeze(0)
        losses = {"stacked": self._stack, "vmap": self._vmap, "branches": self._branches}[
            self.form
        ]()
        self.optimiser.step(self.grad, lr)
        if self.form == "branches":
            for learner, tensors in zip(self.captured, self.tensors, strict=True):
                learner.after_step()
                learner.sync_buffers(tensors)
        self.total += losses
        self.now += 1

    def _stack(self) -> Tensor:
        draw = {
            name: entries.index_select(1, self.now).squeeze(1)
            for name, entries in self.stacked_draws.items()
        }
        losses, grads = self.captured[0].gradient(draw)
        flattened(grads, 1, self.grad)
        return losses

    def _vmap(self) -> Tensor:
        learner = self.captured[0]
        names = list(learner.learned())

        def one(learned: Tensors, inputs: Tensors, draws: Draws) -> tuple[Tensors, Tensor]:
            def loss(learned: Tensors) -> Tensor:
                answer: Tensor = functional_call(learner, inputs | learned, (self._entry(draws),))
                return answer

            return grad_and_value(loss)(learned)

        learned = {name: self.stacked[name] for name in names}
        inputs = {name: tensor for name, tensor in self.stacked.items() if name not in learned}
        grads, losses = vmap(one, randomness="different")(learned, inputs, self.stacked_draws)
        flattened((grads[name] for name in names), 1, self.grad)
        answer: Tensor = losses
        return answer

    def _branches(self) -> Tensor:
        main, losses = torch.cuda.current_stream(), []
        for number, learner in enumerate(self.captured):
            stream = self.streams[number]
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                loss, grads = learner.gradient(self._entry(self.draws[number]))
                flattened(grads, 0, self.grad[number])
                losses.append(loss.detach())
        for stream in self.streams:
            main.wait_stream(stream)
        return torch.stack(losses)

    def _entry(self, draws: Draws) -> Draws:
        return {
            name: entries.index_select(0, self.now).squeeze(0) for name, entries in draws.items()
        }


def _stacked(tensors: Sequence[Tensors]) -> tuple[Tensors, list[Tensors]]:
    """Tensors by name with a leading dimension of replicas, and each replica's slices of them."""
    stacked = {name: torch.stack([replica[name] for replica in tensors]) for name in tensors[0]}
    return stacked, [
        {name: table[number] for name, table in stacked.items()} for number in range(len(tensors))
    ]


def _copies(tensors: Tensors, owned: Collection[str] = ()) -> Tensors:
    """Copies of tensors, but for those named in `owned`, which nobody else holds."""
    return {name: t if name in owned else t.clone() for name, t in tensors.items()}


def _streams(count: int, device: torch.device) -> list[torch.cuda.Stream]:
    """`count` streams, of which the first, to capture on, differs from all others.

    Torch takes streams from a pool in turn. If another one were the first again, its operations
    would not run beside those of the first, but after them.
    """
    first, *others = (
        torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        for _ in range(min(count, _POOL))
    )
    return [first, *islice(cycle(others), count - 1)]


def _dtype(tensors: Tensors) -> torch.dtype:
    return next(iter(tensors.values())).dtype

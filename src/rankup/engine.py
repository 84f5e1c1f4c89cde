"""How steps are taken: one after another in Python, or captured once and replayed as a CUDA graph,
for one learner or for several seeds together.

A learner says what a step is. A step is a pure function of the learner's tensors and of what was
drawn for it, so it does not matter to the learner how its steps are taken.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from rankup import seeds
from rankup.feed import Draws, Feed
from rankup.layers import Tensors
from rankup.optimiser import FlatAdam
from rankup.recipe import Recipe

Form = Literal["stacked", "vmap", "branches"]

_ALIGNED = 32  # numbers
_BESIDE = 2  # streams
_HERE = nullcontext()


class Learner(nn.Module, ABC):
    """One network on its way through one task.

    Its tensors go by their names as attributes of the learner, as in `named_parameters()`. A
    method with steps of its own overrides `gradient` (other gradients, or a second backward pass),
    `settle` (what must hold after every update) or `draws` (rows of a replay memory), and must not
    wait for the device in any of them.
    """

    # How several learners of this kind are captured in one graph: `gradient` itself takes tensors
    # with a leading dimension of replicas; or torch can `vmap` its loss; or each is a branch.
    replicas: Form = "branches"
    # Streams beside the one that a captured step runs on, for what does not wait for its data.
    beside: Sequence[torch.cuda.Stream] = ()
    changed: tuple[str, ...] = ()  # what a step changes in place beside the parameters

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self.feed = feed
        self._begun: set[torch.cuda.Stream] = set()  # streams beside with something to wait for

    @abstractmethod
    def learned(self) -> Tensors:
        """The parameters that steps change, as they are now."""

    @abstractmethod
    def read(self) -> Tensors:
        """All else that a step looks at: data, and what is frozen."""

    @abstractmethod
    def keep(self, learned: Tensors) -> None:
        """Take over parameters that were learned."""

    @abstractmethod
    def forward(self, draw: Draws) -> Tensor:
        """The loss of one step."""

    def key(self) -> Hashable:
        """Learners with equal keys and tensors of equal shapes take the same steps, so that one
        captured graph serves them all."""
        return id(self)

    def draws(self, generator: torch.Generator) -> Draws:
        """All that is random in an epoch, with an entry for each step."""
        return self.feed.draws(generator)

    def gradient(self, draw: Draws) -> tuple[Tensor, Sequence[Tensor]]:
        """The loss of one step and its gradient by each parameter."""
        loss = self(draw)
        return loss, torch.autograd.grad(loss, self._leaves)

    def settle(self, draw: Draws) -> None:
        """What is to be done after the parameters were changed: nothing."""

    def aside(self, number: int = 0) -> AbstractContextManager[object]:
        """Inside, compute at the same time as what comes after, where there are streams for it.
        What is read or made inside has to be held until `join`, or its memory could be used for
        something else before."""
        if not self.beside:
            return _HERE
        stream = self.beside[number % len(self.beside)]
        stream.wait_stream(torch.cuda.current_stream())
        self._begun.add(stream)
        return torch.cuda.stream(stream)

    def join(self) -> None:
        """Go on when all that was begun aside is done."""
        while self._begun:
            torch.cuda.current_stream().wait_stream(self._begun.pop())

    @contextmanager
    def bound(self, tensors: Tensors) -> Iterator[None]:
        """Inside, the learner's tensors are these."""
        before = {}
        self._leaves = [self.get_parameter(name) for name in self.learned()]
        try:
            for name, tensor in tensors.items():
                before[name] = self._exchange(name, tensor)
            yield
        finally:
            for name, tensor in before.items():
                self._exchange(name, tensor)

    def _exchange(self, name: str, tensor: Tensor) -> Tensor:
        owner, _, key = name.rpartition(".")
        part = self.get_submodule(owner)
        if (parameter := part._parameters.get(key)) is not None:
            before, parameter.data = parameter.data, tensor
        else:
            before = part.get_buffer(key)
            part._buffers[key] = tensor
        return before


class Steps(ABC):
    """The steps of one task, for one or for several learners."""

    learners: Sequence[Learner]

    @abstractmethod
    def epoch(self, draws: Sequence[Draws], rates: Sequence[float], seed: int) -> Tensor:
        """Take the steps of an epoch; give back each learner's losses, summed. The seed is for
        what a module draws by itself, as dropout does."""

    @abstractmethod
    def state(self, number: int) -> Tensors:
        """What it takes for one learner to go on from here."""

    @abstractmethod
    def keep(self) -> None:
        """Hand to every learner what it has learned so far."""

    def resume(self, number: int, state: Tensors) -> None:
        for name, tensor in self.state(number).items():
            tensor.copy_(state[name])


class Engine:
    """Chooses how steps are taken, by a fixed rule, and captures a graph only when it must."""

    def __init__(self, note: Callable[[str], None] = warnings.warn) -> None:
        self.note = note
        self._graph: Graph | None = None

    def start(self, learners: Sequence[Learner]) -> Steps:
        recipe = learners[0].feed.recipe
        form = self._form(learners)
        if form is None:
            return Eager(learners, recipe)
        signature = form, *(_signature(learner) for learner in learners)
        if self._graph is None or self._graph.signature != signature:
            self._graph = None  # first, so that its memory is free
            try:
                self._graph = Graph(form, learners, recipe, signature)
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[0]
                self.note(f"steps are taken one by one, as they cannot be captured: {reason}")
                return Eager(learners, recipe)
        self._graph.start(learners)
        return self._graph

    def _form(self, learners: Sequence[Learner]) -> Form | None:
        """None: as Python runs."""
        if learners[0].feed.device.type != "cuda":
            return None
        if len({learner.feed.steps for learner in learners}) > 1:
            self.note("seeds are trained one by one, as their tasks differ in length")
            return None
        alike = len({_shapes(learner) for learner in learners}) == 1
        return learners[0].replicas if len(learners) > 1 and alike else "branches"


class Eager(Steps):
    """Step after step, learner after learner."""

    def __init__(self, learners: Sequence[Learner], recipe: Recipe) -> None:
        self.learners, self.recipe = learners, recipe
        self.tensors, self.optimisers = [], []
        for learner in learners:
            learned = learner.learned()
            flat = _gathered((tensor.detach() for tensor in learned.values()), 0)
            self.tensors.append(learner.read() | _views(flat, learned))
            self.optimisers.append(FlatAdam(flat, recipe.weight_decay))

    def epoch(self, draws: Sequence[Draws], rates: Sequence[float], seed: int) -> Tensor:
        with _seeded(self.learners[0].feed.device, seed), precise(self.recipe):
            return torch.stack([self._one(n, drawn, rates) for n, drawn in enumerate(draws)])

    def _one(self, number: int, drawn: Draws, rates: Sequence[float]) -> Tensor:
        learner, optimiser = self.learners[number], self.optimisers[number]
        total = torch.zeros((), device=learner.feed.device)
        with learner.bound(self.tensors[number]):
            for step, lr in enumerate(rates):
                draw = {name: entries[step] for name, entries in drawn.items()}
                loss, grads = learner.gradient(draw)
                optimiser.step(_gathered(grads, 0), lr)
                learner.settle(draw)
                total += loss.detach()
        return total

    def state(self, number: int) -> Tensors:
        optimiser, tensors = self.optimisers[number], self.tensors[number]
        return _state(optimiser, optimiser.flat, optimiser.mean, optimiser.square) | {
            f"buffer/{name}": tensors[name] for name in self.learners[number].changed
        }

    def keep(self) -> None:
        for learner, tensors in zip(self.learners, self.tensors, strict=True):
            learner.keep({name: tensors[name] for name in learner.learned()})


class Graph(Steps):
    """One step of all learners, captured once and replayed.

    The graph works on tensors of its own, into which each task's are copied. One that was captured
    for a task so serves every later task whose tensors have the same shapes.
    """

    def __init__(
        self, form: Form, learners: Sequence[Learner], recipe: Recipe, signature: Hashable
    ) -> None:
        self.form, self.recipe, self.signature = form, recipe, signature
        # The learners at the capture: they are what a replay computes, whoever's values it is for.
        self.captured = self.learners = learners
        self.device = learners[0].feed.device
        self._allocate()
        self._capture()

    def start(self, learners: Sequence[Learner]) -> None:
        """Take the tensors of learners that are about to begin."""
        self.learners = learners
        for number, learner in enumerate(learners):
            for name, tensor in (learner.read() | learner.learned()).items():
                self.places[number][name].copy_(tensor.detach())
        self.optimiser.restart()

    def epoch(self, draws: Sequence[Draws], rates: Sequence[float], seed: int) -> Tensor:
        for number, drawn in enumerate(draws):
            for name, entries in drawn.items():
                self.drawn[number][name].copy_(entries)
        self.rates.copy_(torch.tensor(rates), non_blocking=True)
        self.now.zero_()
        self.total.zero_()
        with _seeded(self.device, seed):
            for _ in rates:
                self.graph.replay()
        return self.total.clone()

    def state(self, number: int) -> Tensors:
        optimiser, places = self.optimiser, self.places[number]
        own = (table[number] for table in (optimiser.flat, optimiser.mean, optimiser.square))
        return _state(optimiser, *own) | {
            f"buffer/{name}": places[name] for name in self.captured[number].changed
        }

    def keep(self) -> None:
        for number, learner in enumerate(self.learners):
            places = self.places[number]
            learner.keep({name: places[name] for name in learner.learned()})
            for name in learner.changed:
                learner.read()[name].copy_(places[name])

    def _allocate(self) -> None:
        generator = torch.Generator(self.device).manual_seed(0)
        learned = [learner.learned() for learner in self.learners]
        count = sum(_room(tensor) for tensor in learned[0].values())
        flat = torch.zeros(len(learned), count, device=self.device, dtype=_dtype(learned[0]))
        self.optimiser = FlatAdam(flat, self.recipe.weight_decay)
        self.grad = torch.empty_like(flat)
        read = [learner.read() for learner in self.learners]
        draws = [learner.draws(generator) for learner in self.learners]
        # Tables with a leading dimension of replicas, or one for each of them; `places` and
        # `drawn` are each learner's own part of them either way.
        if self.form == "branches":
            self.places = [_copies(tensors) for tensors in read]
            self.drawn = [_copies(drawn) for drawn in draws]
        else:
            self.stacked, self.places = _stacked(read)
            self.stacked_draws, self.drawn = _stacked(draws)
            self.stacked |= _views(flat, learned[0])
        for number, places in enumerate(self.places):
            places |= _views(flat[number], learned[number])
        self.now = torch.zeros(1, dtype=torch.long, device=self.device)  # the step of the epoch
        self.rates = torch.zeros(self.learners[0].feed.steps, device=self.device)
        self.total = flat.new_zeros(len(learned))

    def _capture(self) -> None:
        self.streams = [_stream(self.device) for _ in self.captured]
        for learner in self.captured:
            learner.beside = [_stream(self.device) for _ in range(_BESIDE)]
        warm_up, self.graph = _stream(self.device), torch.cuda.CUDAGraph()
        with ExitStack() as stack:
            stack.enter_context(precise(self.recipe))
            stack.enter_context(torch.cuda.device(self.device))
            if self.form == "stacked":
                stack.enter_context(self.captured[0].bound(self.stacked))
            elif self.form == "branches":
                for learner, places in zip(self.captured, self.places, strict=True):
                    stack.enter_context(learner.bound(places))
            warm_up.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(warm_up):  # libraries make themselves ready in their first call
                for _ in range(2):
                    self.now.zero_()
                    self._step()
            torch.cuda.current_stream().wait_stream(warm_up)
            with torch.cuda.graph(self.graph):
                self._step()

    def _step(self) -> None:
        lr = self.rates.index_select(0, self.now).view(())
        losses = {"stacked": self._stack, "vmap": self._vmap, "branches": self._branches}[
            self.form
        ]()
        self.optimiser.step(self.grad, lr)
        if self.form == "branches":
            for learner, drawn in zip(self.captured, self.drawn, strict=True):
                learner.settle(self._entry(drawn))
        self.total += losses
        self.now += 1

    def _stack(self) -> Tensor:
        draw = {
            name: entries.index_select(1, self.now).squeeze(1)
            for name, entries in self.stacked_draws.items()
        }
        losses, grads = self.captured[0].gradient(draw)
        _gathered(grads, 1, self.grad)
        return losses

    def _vmap(self) -> Tensor:
        learner = self.captured[0]
        names = list(learner.learned())

        def one(learned: Tensors, read: Tensors, drawn: Draws) -> tuple[Tensors, Tensor]:
            def loss(learned: Tensors) -> Tensor:
                answer: Tensor = functional_call(learner, read | learned, (self._entry(drawn),))
                return answer

            return grad_and_value(loss)(learned)

        learned = {name: self.stacked[name] for name in names}
        read = {name: tensor for name, tensor in self.stacked.items() if name not in learned}
        grads, losses = vmap(one, randomness="different")(learned, read, self.stacked_draws)
        _gathered((grads[name] for name in names), 1, self.grad)
        answer: Tensor = losses
        return answer

    def _branches(self) -> Tensor:
        main, losses = torch.cuda.current_stream(), []
        for number, learner in enumerate(self.captured):
            stream = self.streams[number]
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                loss, grads = learner.gradient(self._entry(self.drawn[number]))
                _gathered(grads, 0, self.grad[number])
                losses.append(loss.detach())
        for stream in self.streams:
            main.wait_stream(stream)
        return torch.stack(losses)

    def _entry(self, drawn: Draws) -> Draws:
        return {
            name: entries.index_select(0, self.now).squeeze(0) for name, entries in drawn.items()
        }


@contextmanager
def precise(recipe: Recipe) -> Iterator[None]:
    """Inside, float32 matrices are multiplied as the recipe says."""
    before = torch.get_float32_matmul_precision()
    if recipe.precision == "tf32":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    with seeds.forked(device):
        torch.manual_seed(seed)
        yield


def _room(tensor: Tensor) -> int:
    """Numbers that a tensor takes in a flat one: a GPU's kernels want each of them aligned."""
    unit = _ALIGNED if tensor.device.type == "cuda" else 1
    return math.ceil(tensor.numel() / unit) * unit


def _views(flat: Tensor, like: Tensors) -> Tensors:
    """Parts of `flat` in the shapes of `like`, behind a leading dimension where it has one."""
    parts = torch.split(flat, [_room(tensor) for tensor in like.values()], -1)
    return {
        name: part[..., : tensor.numel()].view((*flat.shape[:-1], *tensor.shape))
        for (name, tensor), part in zip(like.items(), parts, strict=True)
    }


@cache  # so that a captured step does not make them again and again
def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _gathered(grads: Iterable[Tensor], leading: int, out: Tensor | None = None) -> Tensor:
    """What `_views` takes apart; all but `leading` dimensions become one."""
    parts = []
    for grad in grads:
        row = grad.reshape(*grad.shape[:leading], -1)
        parts.append(row)
        single = grad if leading == 0 else grad[0]
        if gap := _room(single) - single.numel():
            parts.append(_zeros((*row.shape[:-1], gap), row.dtype, row.device))
    return torch.cat(parts, -1, out=out)


def _stacked(tensors: Sequence[Tensors]) -> tuple[Tensors, list[Tensors]]:
    """Tensors by name with a leading dimension, and each one's part of them."""
    stacked = {name: torch.stack([each[name] for each in tensors]) for name in tensors[0]}
    return stacked, [
        {name: table[number] for name, table in stacked.items()} for number in range(len(tensors))
    ]


def _copies(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _state(optimiser: FlatAdam, flat: Tensor, mean: Tensor, square: Tensor) -> Tensors:
    return {"flat": flat, "mean": mean, "square": square, "count": optimiser.count}


def _stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def _dtype(tensors: Tensors) -> torch.dtype:
    return next(iter(tensors.values())).dtype


def _shapes(learner: Learner) -> Hashable:
    tensors: dict[str, Any] = learner.read() | learner.learned()
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())


def _signature(learner: Learner) -> Hashable:
    feed = learner.feed
    return learner.key(), _shapes(learner), feed.recipe, feed.steps, feed.batch_size

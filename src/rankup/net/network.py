"""`grow` turns any module into an `IncrementalNet`, which learns one task after another and cannot
forget one."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from rankup.errors import RankupError, TaskStateError
from rankup.growing.build import build_module
from rankup.growing.options import GrowOptions
from rankup.growing.plan import make_plan
from rankup.layers import (
    TaskLayer,
    TaskNorm,
    Tensors,
    active,
    pooled_statistics,
    refuse_other_dtype,
    rounding,
)
from rankup.layers.rounding import Store
from rankup.layers.spec import tensor_name
from rankup.net import size, validate
from rankup.net.merge import merge
from rankup.net.mixed import MixedBatches
from rankup.net.shared import SharedTensors
from rankup.net.tasks import KnownTask, TaskList
from rankup.rank import RankRule
from rankup.utils.signals import undisturbed
from rankup.utils.torch_modes import outside_inference

TaskRef = str | int | Tensor | Sequence[str | int]
Patterns = str | Sequence[str]


def grow(
    module: nn.Module,
    rank: RankRule,
    *,
    base: Literal["new", "keep"] = "new",
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    last: int | None = None,
    head: str | None = None,
    seed: int = 0,
    store: Store = "full",
) -> "IncrementalNet":
    """A network with the module's architecture that learns task after task.

    Linear and convolutional layers become sums of factors; normalisation layers and the head are
    kept per task. The module itself is not modified.

    Args:
        module: any module; parts that cannot be factored are named in the error.
        rank: how many factors a task adds: one rule, or rules by layer name (`{"blocks.*": …}`).
        base: `"new"` discards the module's weights (except for a parameter that none of its
            modules knows how to redraw: that keeps its values); `"keep"` leaves them as a constant
            part of every layer, to which the factors add, for a pretrained module.
        include: name patterns of the layers to factor.
        exclude: name patterns of what not to factor. What is not factored is trained with the
            first task (with `base="keep"` not even then) and constant after it.
        last: factor only this many last layers, not counting the head; what runs before them,
            norms included, is treated like what is not factored.
        head: the name of the output layer, if it is not the Linear that runs last.
        seed: for everything random in the network.
        store: what a task's numbers are rounded to when it is committed, and stored as: `"full"`
            leaves them as they are, `"float16"` halves the files, `"int8"` quarters them.

    >>> import rankup
    >>> net = rankup.grow(rankup.models.mlp(784, hidden=[256, 256]), rankup.Rank(first=11, step=1))
    >>> net.begin_task("digits", classes=10)
    >>> net(torch.zeros(3, 784), task="digits").shape
    torch.Size([3, 10])
    >>> net.commit_task()
    >>> net.size().total
    20176
    """
    patterns = _patterns(include), _patterns(exclude) or ()
    options = GrowOptions(rank, base, *patterns, last, head, seed, store)
    with outside_inference():
        net = IncrementalNet(module, options)
    net.plan.warn_if_capped()
    return net


class IncrementalNet(nn.Module):
    """A network that learns task after task; `grow` makes it.

    What is trainable is exactly `parameters()`: between `begin_task` and `commit_task` the new
    task's, otherwise nothing. Everything else is constant. `options`, `plan` and `parts` tell how
    the network is made, and are only to be read.
    """

    def __init__(self, module: nn.Module, options: GrowOptions) -> None:
        super().__init__()
        self.options = options
        self.plan = make_plan(module, options)
        self.body, layers = build_module(module, self.plan, options)
        # What goes through a task's stages: every task layer, and the rest as one.
        self._shared = SharedTensors(self.plan.dense, self.body)
        self.parts: list[TaskLayer | SharedTensors] = [*layers, self._shared]
        self._tasks = TaskList()
        self._mixed = MixedBatches(self._tasks)
        self.training = module.training
        self._hold_constant()

    @property
    def tasks(self) -> list[str]:
        """The names of the committed tasks in the order in which they were learned."""
        return self._tasks.names

    @property
    def classes(self) -> dict[str, int]:
        """How many classes each committed task has."""
        return {task.name: task.classes for task in self._tasks.tasks}

    @property
    def learning(self) -> str | None:
        """The name of the task being learned, between `begin_task` and `commit_task`."""
        return self._tasks.learning.name if self._tasks.learning else None

    @property
    def device(self) -> torch.device:
        """Where the network computes."""
        return next(self.buffers()).device

    @property
    def dtype(self) -> torch.dtype:
        """What it always computes in."""
        return self.plan.dtype

    @outside_inference()
    def begin_task(
        self,
        name: str,
        classes: int,
        *,
        selectors: float | Literal["previous"] = 0.0,
        norms: Literal["fresh", "previous"] = "fresh",
        factors: float = 1.0,
    ) -> None:
        """Add a task to learn: new factors, selectors, biases, norms and a head, all of them in
        `parameters()` until it is committed.

        Args:
            name: the task's name from now on.
            classes: how many classes it has, at least 2.
            selectors: where its selectors over old factors start: 0 as in the paper, another
                number, or `"previous"`, the last task's. Over its own factors they start at 1;
                over seeded factors at random, or with `"previous"` at the last task's.
            norms: whether the weights of its norms start `"fresh"` or where the `"previous"`
                task's ended.
            factors: how long the vectors of its own factors are at the start; they are orthogonal.
        """
        task = self._tasks.begin(name, classes)
        start = validate.start(selectors, norms, factors)
        started = [part.start(task.classes, start) for part in self.parts]
        try:
            for part, values in zip(self.parts, started, strict=True):
                part.open(values)
            self._tasks.learning = task
        except BaseException:
            for part in self.parts:
                part.close()
            raise

    @outside_inference()
    def commit_task(self, calibrate: Iterable[Any] | None = None) -> None:
        """Make all that the task learned constant. It can never change after this.

        Args:
            calibrate: batches of plain inputs of the task, shuffled and not augmented, over which
                batch norms pool their statistics. Only networks with batch norm need them. An input
                is what the network is called with, or a pair of that and a dict of the module's own
                options.
        """
        task = self._tasks.opened("commit_task")
        self._shared.refuse_made(self.body)
        with self._as_stored():
            try:
                with self._pooled_statistics(calibrate):
                    learned = [part.learned() for part in self.parts]
            finally:
                self._hold_constant()  # of what was found to change only now, too
            for part, tensors in zip(self.parts, learned, strict=True):
                validate.learned(part.spec, tensors, len(self._tasks.tasks), task)
            self._refuse_not_finite(learned)
            form = self.options.store
            pairs = zip(self.parts, learned, strict=True)
            self._append([task], [[rounding.rounded(part.spec, own, form)] for part, own in pairs])

    def abandon_task(self) -> None:
        """Drop the task being learned; the network is again what it was before `begin_task`."""
        self._tasks.opened("abandon_task")
        for part in self.parts:
            part.close()
        self._tasks.learning = None

    def forward(self, x: Any, task: TaskRef, **options: Any) -> Any:
        """The module's output for one task, given by name or index, or for a task per sample,
        given as a tensor of indices or a list of names; `options` go to the module."""
        validate.inputs(x, self.dtype)
        task = task.tolist() if isinstance(task, np.ndarray) else task
        if isinstance(task, list | tuple):
            task = torch.tensor([self._tasks.index(each) for each in task], dtype=torch.long)
        if isinstance(task, Tensor) and task.dim():
            # Inputs that are not tensors do not tell where the module computes.
            device = x.device if isinstance(x, Tensor) else self.device
            return self._mixed.answer(x, task, options, self._run, device, self.training)
        with active(self._tasks.index(task)):
            return self._run(x, options)

    @outside_inference()
    def merged(self, task: str | int) -> nn.Module:
        """A plain module of torch's own layers that computes what this network does for a task:
        dense weights, and batch norms folded into the convolutions before them where exact."""
        return merge(self.body, list(self._layers()), self.plan, self._tasks.committed(task))

    def size(self, task: str | int | None = None) -> size.Size:
        """How many numbers the network stores, or with `task` how many that task added."""
        if task is None:
            return size.of_network(self)
        return size.of_task(self, self._tasks.committed(task))

    def train(self, mode: bool = True) -> "IncrementalNet":
        super().train(mode)
        self._hold_constant()
        return self

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Torch's own, except that a state which does not fit is refused before anything is loaded:
        torch first loads what fits, and earlier tasks would be lost."""
        validate.state(self, state_dict, strict, assign)
        return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, metadata: Any, *rest: Any
    ) -> None:
        # Before any layer loads, also where the network is a part of another module. Whether names
        # may be missing, torch does not tell here.
        own = {k.removeprefix(prefix): t for k, t in state_dict.items() if k.startswith(prefix)}
        assign = bool(metadata.get("assign_to_params_buffers"))
        validate.state(self, own, strict=False, assign=assign)
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)

    @outside_inference()
    def __deepcopy__(self, memo: dict[int, Any]) -> "IncrementalNet":
        copied = memo[id(self)] = type(self).__new__(type(self))
        # As torch pickles a module: without the result of `compile`, which runs this network.
        own = self.__getstate__()  # type: ignore[no-untyped-call]
        copied.__dict__.update(copy.deepcopy(own, memo))
        return copied

    def extra_repr(self) -> str:
        return f"tasks={self.tasks}, learning={self.learning!r}"

    # For `fitting` and `store` in this package.

    @property
    def _edition(self) -> int:
        """Increases whenever other tensors are loaded into the network, its body or one layer."""
        return sum(layer.edition for layer in self._layers())

    def _append(self, tasks: Sequence[KnownTask], added: Sequence[Sequence[Tensors]]) -> None:
        """Make tasks constant, the one just learned or those of a file: for each part, a dict of
        tensors for each of them."""
        # First everything that needs memory and may fail, then everything that cannot.
        extended = [part.extended(*new) for part, new in zip(self.parts, added, strict=True)]
        with undisturbed():
            for part, tables in zip(self.parts, extended, strict=True):
                part.close()
                part.install(tables, len(tasks))
            for task in tasks:
                self._tasks.append(task)
            self._hold_constant()

    def _undo_trial(self) -> None:
        """Restore the module after a trial run, and from now on hold what must not change."""
        self._shared.refuse_made(self.body)
        self._shared.refuse_reshaped()
        self._shared.undo_trial()
        self._hold_constant()

    def _refuse_restless(self) -> None:
        self._shared.refuse_restless()

    @property
    def _is_constant(self) -> bool:
        """Whether what is neither factored nor kept per task no longer changes."""
        return bool(self._tasks.tasks) or self.options.base == "keep"

    @property
    def _only_brought(self) -> list[str]:
        """The module's own tensors that no file holds yet and that no seed can draw again."""
        return [] if self._is_constant else self._shared.brought

    def _hold_constant(self) -> None:
        """Keep norms that were left as they are from averaging further once they are constant, and
        other modules that are known to change their buffers from doing so."""
        self._held = list(self._shared.frozen)
        if self._is_constant:
            parts = self.body.modules()
            self._held += (p for p in parts if isinstance(p, nn.modules.batchnorm._NormBase))
            self._held += self._shared.updating
        self._hold()

    def _hold(self) -> None:
        """Put the held parts into evaluation mode, but not the modules inside them."""
        for part in self._held:
            if part.training:  # checked first: torch.compile would record a write
                part.training = False

    def _is_to_be_held(self) -> bool:
        """Whether nothing is being learned but the module is in training mode: it may change
        buffers on which answers depend, without being known to."""
        return (
            self._is_constant
            and self.body.training
            and self._tasks.learning is None
            and not torch.compiler.is_compiling()
            and not torch._C._are_functorch_transforms_active()
        )

    def _layers(self) -> Iterator[TaskLayer]:
        return (part for part in self.parts if isinstance(part, TaskLayer))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # Before any layer is asked, so that a refusal leaves every part as it was.
        refuse_other_dtype(fn, self.dtype)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._shared.tie()
        return self

    @contextmanager
    def _as_stored(self) -> Iterator[None]:
        """Inside, what was learned is as it will come back from a file, so that batch norms pool
        statistics of what will answer. If the commit fails, it is restored as learned."""
        form, before = self.options.store, list[tuple[nn.Parameter, Tensor]]()
        layers = list(self._layers()) if form != "full" else []
        self._refuse_not_finite([layer.learned() for layer in layers])
        try:
            for layer in layers:
                for key, value in rounding.rounded(layer.spec, layer.learned(), form).items():
                    parameter = layer.get_parameter(f"new_{key}")
                    before.append((parameter, parameter.detach().clone()))
                    parameter.data.copy_(value)
            yield
        except BaseException:
            for parameter, value in before:
                parameter.data.copy_(value)
            raise

    @contextmanager
    def _pooled_statistics(self, batches: Iterable[Any] | None) -> Iterator[None]:
        """Inside, batch norms hold the pooled statistics of the task's data."""
        layers = (layer for layer in self._layers() if isinstance(layer, TaskNorm))
        norms = [norm for norm in layers if norm.wants_statistics]
        if norms and (isinstance(batches, Tensor | str) or not isinstance(batches, Iterable)):
            raise TaskStateError(
                f"the network has batch norms ({norms[0].spec.name}, …) and takes their statistics "
                "from the task's data: call commit_task(calibrate=batches) with an iterable of "
                "input tensors"
            )
        open_task = len(self._tasks.tasks)

        def run(batch: Any) -> None:
            x, options = validate.batch(batch)
            self(x, task=open_task, **options)

        with pooled_statistics(self, norms, () if batches is None else batches, run):
            yield

    def _refuse_not_finite(self, learned: Sequence[Tensors]) -> None:
        for part, tensors in zip(self.parts, learned, strict=False):  # or of layers, the first
            given = part.as_given() if part is self._shared else ()
            for key, tensor in tensors.items():
                if key not in given and not bool(torch.isfinite(tensor).all()):
                    name = tensor_name(part.spec, key)
                    raise TaskStateError(
                        f"task {self.learning!r} cannot be committed: {name} holds values that are "
                        "not finite; abandon_task drops the task"
                    )

    def _run(self, x: Any, options: dict[str, Any]) -> Any:
        self._hold()  # the body's mode may have been set directly
        try:
            if not self._is_to_be_held():
                return self.body(x, **options)
            try:
                with self._shared.held():
                    return self.body(x, **options)
            finally:
                self._hold_constant()  # of what was found to change only now, too
        except StopIteration:
            raise RankupError(
                "the module's forward takes the first of its parameters, but between tasks a grown "
                "network has none: use x.device or x.dtype there, or a buffer's"
            ) from None


def _patterns(given: Patterns | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, Iterable):
        return (given,)
    return tuple(given)

"""`grow` turns any module into an `IncrementalNet`, which learns one task after another and cannot
forget one."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from rankup.errors import RankupError
from rankup.growing.build import build_module
from rankup.growing.options import GrowOptions
from rankup.growing.plan import make_plan
from rankup.layers import TaskHead, TaskLayer, Tensors, active, refuse_other_dtype
from rankup.layers.rounding import Store
from rankup.net import size, summary, validate
from rankup.net.by_kind import by_kind
from rankup.net.commit import commit
from rankup.net.for_task import TaskModule, for_task
from rankup.net.groups import Split
from rankup.net.merge import merge
from rankup.net.mixed import MISSING, MixedBatches
from rankup.net.settings import TaskSettings, give_back
from rankup.net.shared import SharedTensors
from rankup.net.tasks import KnownTask, TaskList
from rankup.rank import RankRule
from rankup.utils.signals import undisturbed

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
    net = IncrementalNet(module, GrowOptions(rank, base, *patterns, last, head, seed, store))
    net.plan.warn(net.options)
    return net


class IncrementalNet(nn.Module):
    """A network that learns task after task; `grow` makes it.

    What is trainable is exactly `parameters()`: between `begin_task` and `commit_task` the new
    task's, otherwise nothing. Everything else is constant. Answers are thread-safe; learning is
    one thread's job. `options`, `plan` and `parts` tell how the network is made, and are only to
    be read.
    """

    def __init__(self, module: nn.Module, options: GrowOptions) -> None:
        super().__init__()
        self.options = options
        self.plan = make_plan(module, options)
        self.body, self.layers = build_module(module, self.plan, options)
        self._shared = SharedTensors(self.plan.dense, self.body)
        # What goes through a task's stages: every task layer, and what tasks share as one.
        self.parts: list[TaskLayer | SharedTensors] = [*self.layers, self._shared]
        self._tasks = TaskList()
        self._mixed = MixedBatches(self._tasks, one_by_one=self.plan.substitutes)
        heads = [layer for layer in self.layers if isinstance(layer, TaskHead)]
        self._settings = TaskSettings(self.body, heads, module)
        self.saved_files: dict[str, Any] = {}  # for `save`: descriptions of files that never change
        self.training = module.training
        self._shared.hold_modes()

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

    def begin_task(
        self,
        name: str,
        classes: int | None = None,
        *,
        outputs: int | None = None,
        selectors: float | Literal["previous"] = 0.0,
        norms: Literal["fresh", "previous"] = "fresh",
        factors: float = 1.0,
    ) -> None:
        """Add a task to learn: new factors, selectors, biases, norms and a head, all of them in
        `parameters()` until it is committed.

        Args:
            name: the task's name from now on.
            classes: how many classes it has, at least 2.
            outputs: in place of classes, how many numbers it answers with, at least 1: for
                regression, several labels at once, or any other loss.
            selectors: where its selectors over old factors start: 0 as in the paper, another
                number, or `"previous"`, the last task's. Over its own factors they start at 1;
                over seeded factors at random, or with `"previous"` at the last task's.
            norms: whether the weights of its norms start `"fresh"` or where the `"previous"`
                task's ended.
            factors: how long the vectors of its own factors are at the start; they are orthogonal.
        """
        task = self._tasks.begin(name, classes, outputs)
        start = validate.start(selectors, norms, factors)
        values = [part.start(task.classes, start) for part in self.parts]
        try:
            for part, tensors in zip(self.parts, values, strict=True):
                part.open(tensors)
            self._tasks.learning = task
        except BaseException:
            for part in self.parts:
                part.close()
            raise

    def commit_task(self, calibrate: Iterable[Any] | None = None) -> None:
        """Make all that the task learned constant. It can never change after this.

        Args:
            calibrate: batches of plain inputs of the task, shuffled and not augmented, over which
                batch norms pool their statistics. Only networks with batch norm need them. An input
                is what the network is called with, or a pair of that, None if there is nothing, and
                a dict of the module's own options.
        """
        commit(self, self._tasks.in_progress("commit_task"), calibrate)

    def abandon_task(self) -> None:
        """Drop the task being learned; the network is again what it was before `begin_task`."""
        self._tasks.in_progress("abandon_task")
        for part in self.parts:
            part.close()
        self._tasks.learning = None

    def forward(
        self,
        x: Any = MISSING,
        task: TaskRef | None = None,
        *,
        split: Split | None = None,
        **options: Any,
    ) -> Any:
        """The module's output for one task or for a task per sample.

        Args:
            x: the module's first argument, if it is not among the options.
            task: a task's name or index, or a tensor of indices or a list of names, one per sample.
            split: for a task per sample, along which dimension an option is split by task, or None
                if all samples share it. Without a word, tensors whose first dimension is as long
                as the batch are split.
            options: the module's other arguments, or all of them: `net(task="a", **batch)`.
        """
        validate.inputs(x, self.dtype, options)
        task = task.tolist() if isinstance(task, np.ndarray) else task
        if isinstance(task, list | tuple):
            task = torch.tensor([self._tasks.index(each) for each in task], dtype=torch.long)
        if isinstance(task, Tensor) and task.dim():
            # Inputs that are not tensors do not tell where the module computes.
            device = x.device if isinstance(x, Tensor) else self.device
            return self._mixed.answer(x, task, options, self._run, device, split or {})
        with active(self._tasks.index(task)):
            return self._run(x, options)

    def merged(self, task: str | int, *, fold: bool = False) -> nn.Module:
        """A module of the given class with dense weights that computes what this network does for a
        task: its state dict has the given module's names, and it says that it has the task's
        classes.

        Args:
            task: a committed task's name or index.
            fold: whether to fold batch norms into the convolutions before them, where exact: it
                is faster, but its state dict has other names.
        """
        index = self._tasks.committed(task)
        module = merge(self.body, self.layers, self.plan, index, fold)
        give_back(module, self._tasks.tasks[index].classes)
        return module

    def for_task(self, task: str | int) -> TaskModule:
        """This network as a module for one task, be it committed or being learned: called as the
        given module is, with the task's parameters alone, for tools that take any module."""
        index = self._tasks.index(task, or_several=False)
        return for_task(self, [*self.tasks, self.learning or ""][index])

    def parameters_by_kind(self) -> dict[str, list[nn.Parameter]]:
        """The parameters of the task being learned by what they are: `heads`, `factors`,
        `selectors`, `biases`, `norms` and `other`, for groups of an optimiser."""
        return by_kind(self)

    def size(self, task: str | int | None = None) -> size.Size:
        """How many numbers the network stores, or with `task` how many that task added."""
        if task is None:
            return size.of_network(self)
        return size.of_task(self, self._tasks.committed(task))

    def summary(self) -> str:
        """What became of the module's parameters: a line for each kind, with how many numbers a
        task adds, and the share of all weights that has factors."""
        return summary.of_network(self)

    def train(self, mode: bool = True) -> "IncrementalNet":
        super().train(mode)
        self._shared.hold_modes()
        return self

    def extra_repr(self) -> str:
        return f"tasks={self.tasks}, learning={self.learning!r}"

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
            self._shared.hold_modes()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.saved_files.clear()  # they may not hold what is loaded
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # Before any layer is asked, so that a refusal leaves every part as it was.
        refuse_other_dtype(fn, self.dtype)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._shared.tie()
        return self

    def _run(self, x: Any, options: dict[str, Any]) -> Any:
        try:
            with self._settings.of_one_call():
                return self.body(**options) if x is MISSING else self.body(x, **options)
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

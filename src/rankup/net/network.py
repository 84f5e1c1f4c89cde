"""A network that learns one task after another and cannot forget one."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from rankup.data.inputs import Input
from rankup.distributed import sharding
from rankup.errors import RankupError, TaskStateError
from rankup.growing.build import build_module
from rankup.growing.heads import NEW, with_new_head
from rankup.growing.options import GrowOptions
from rankup.growing.plan import Plan
from rankup.growing.planner import make_plan
from rankup.layers import (
    LEARNING,
    TaskHead,
    TaskLayer,
    active,
    merging,
    refuse_other_dtype,
)
from rankup.layers.mixed_call import MixedLayers
from rankup.layers.substitute import reads_one_task
from rankup.net import size, summary, validate, views
from rankup.net.about import About, Note, TaskDescription, annotate, describe
from rankup.net.by_kind import by_kind
from rankup.net.commit import commit
from rankup.net.distributing import Distributing
from rankup.net.for_task import TaskModule, for_task
from rankup.net.graphs import Graphs
from rankup.net.groups import Split
from rankup.net.guess import answer
from rankup.net.guessing import Guessing
from rankup.net.merge import merge
from rankup.net.mixed import MISSING, MixedBatches
from rankup.net.moving import join, remove
from rankup.net.routers.base import Examples
from rankup.net.routers.routing import Routing
from rankup.net.settings import TaskSettings, give_back
from rankup.net.shared import SharedTensors
from rankup.net.stages import begin
from rankup.net.tasks import TaskList, Uses
from rankup.utils.compiling import call, growing_parameters, run_as_it_is

TaskRef = str | int | Tensor | Sequence[str | int]


class IncrementalNet(Guessing, Distributing, nn.Module):
    """A network that learns task after task; `grow` makes it.

    `parameters()` are exactly what is trainable: between `begin_task` and `commit_task` the new
    task's, otherwise nothing. Everything else is constant. Any number of threads may run the
    network while one thread learns a task. `options`, `plan` and `parts` are only to be read.

    Attributes:
        options: the arguments of `grow`.
        plan: what became of each layer of the given module.
        body: a copy of the given module, with task layers.
        layers: the task layers, in the order of the plan.
        parts: all that goes through the stages of a task: the layers, and what tasks share.
        routing: the state of the routers; None if there are none.
        inputs: how inputs are prepared, where a task does not say it; a model may know it.
        notes: by task, people's notes on it.
        saved_files: by task, for `save`, a description of its file, which never changes.
        removed_files: the same for tasks that were removed.
    """

    def __init_subclass__(cls) -> None:
        """Torch's `fully_shard(net)` makes a class of the network's class and one of its own."""
        super().__init_subclass__()
        sharding.refuse_fully_sharded(cls)

    def __init__(
        self,
        module: nn.Module,
        options: GrowOptions,
        plan: Plan | None = None,
        *,
        copy: bool = True,
    ) -> None:
        super().__init__()
        self.options = options
        if plan is None:
            module = with_new_head(module) if options.head == NEW else module
            plan = make_plan(module, options)
        self.plan = plan
        self.body, self.layers = build_module(module, self.plan, options, copy=copy)
        self._shared = SharedTensors(self.plan.dense, self.body, copy=copy)
        self.parts: list[TaskLayer | SharedTensors] = [*self.layers, self._shared]
        for layer in self.layers:
            if isinstance(layer, TaskHead):
                layer.in_place = options.draws == "number"
        self._tasks = TaskList()
        self.routing = None if options.router is None else Routing(options.router, options.seed)
        self._mixed = MixedBatches(
            self._tasks, MixedLayers(self.layers), one_by_one=reads_one_task(self.body)
        )
        self.saved_files: dict[str, Any] = {}
        self.removed_files: list[Any] = []
        self.inputs: Input | None = getattr(module, "inputs", None)
        self.notes: dict[str, Note] = {}
        merging.allow(self.layers)
        heads = [layer for layer in self.layers if isinstance(layer, TaskHead)]
        self._settings = TaskSettings(self.body, heads, module)
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
        """The device of the network's tensors."""
        return next(self.buffers()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the network computes; for a module of several dtypes, that of most of
        its numbers. It never changes."""
        return self.plan.dtype

    def begin_task(
        self,
        name: str,
        classes: int | None = None,
        *,
        outputs: int | None = None,
        uses: Uses = "all",
        about: About | None = None,
        selectors: float | Literal["previous", "halfway"] = 0.0,
        norms: Literal["fresh", "previous"] = "fresh",
        factors: float = 1.0,
        rotations: bool = False,
        views: int = 1,
    ) -> None:
        """Add a task to learn: new factors, selectors, biases, norms and a head, all of them in
        `parameters()` until it is committed.

        Args:
            name: the task's name from now on.
            classes: how many classes it has, at least 2.
            uses: from which tasks' factors it selects, besides its own: `"all"` before it, as in
                the paper, or those of a list of tasks. With `"own"` it stands by itself: it learns
                the same bits in any network of the same seed and can go from one to another.
            about: what is known of it, such as its classes' names; `annotate` adds to that.
            outputs: in place of classes, how many numbers it answers with, at least 1: for
                regression, several labels at once, or any other loss.
            selectors: where its selectors over old factors start: 0 as in the paper, another
                number, `"previous"`, the last task's, or `"halfway"`, the same with those over the
                last task's own factors halved. Over its own factors they start at 1; over seeded
                factors at random, or with `"previous"` and `"halfway"` at the last task's.
            norms: whether the weights of its norms start `"fresh"` or where the `"previous"`
                task's ended.
            factors: how long the vectors of its own factors are at the start; they are orthogonal.
            rotations: whether its head has a row for each class in each of four turns of an image
                while it learns, as `fit` does with `Recipe(rotations=True)`. It answers with its
                classes alone.
            views: with rotations, from how many turned views it answers: 1, for which only the
                classes' own rows are kept, or 4.
        """
        if self.is_undecided:
            raise TaskStateError(
                "this is one of several processes of a group: call net.distribute() if all learn "
                "this network together, or net.distribute(False) if each learns its own"
            )
        task = self._tasks.begin(name, classes, outputs, uses, about, rotations, views)
        if (task.uses is not None or views > 1) and self.options.draws == "number":
            wanted = "use all tasks" if task.uses is not None else "answer from one view"
            raise RankupError(
                f"task {name!r} must {wanted}: the network is of the first format version"
            )
        start = validate.start(
            selectors,
            norms,
            factors,
            key=name if self.options.draws == "name" else None,
            selection=self._tasks.selection(task),
            place=self._tasks.place(task, len(self.tasks)),
        )
        begin(self, task, start)

    def commit_task(
        self, calibrate: Iterable[Any] | None = None, *, examples: Examples | None = None
    ) -> None:
        """Make all that the task learned constant. It can never change after this.

        Args:
            calibrate: batches of plain inputs of the task, shuffled and not augmented, over which
                batch norms pool their statistics, and of which a router keeps what it needs. Only
                networks with batch norm or a router need them. An input is what the network is
                called with, or a pair of that, None if there is nothing, and a dict of the module's
                own options.
            examples: for the router, inputs with their classes, and some that were held out, as
                `fit` gives them. Without, those of `calibrate`, with the classes that the network
                answers.
        """
        commit(self, self._tasks.in_progress("commit_task"), calibrate, examples)

    def abandon_task(self) -> None:
        """Drop the task being learned; the network is again what it was before `begin_task`."""
        self._tasks.in_progress("abandon_task")
        for part in self.parts:
            part.close()
        self._tasks.learning = None

    def remove_task(self, task: str | int) -> None:
        """Drop a committed task from whose factors no other selects. All others keep their bits."""
        remove(self, self._tasks.committed(task))

    def join(self, other: "IncrementalNet") -> None:
        """Take over all tasks of a network that was grown alike: from the same module, by the same
        rule and seed. Tasks that both know must be equal; all tasks keep their bits."""
        join(self, other)

    @run_as_it_is
    def forward(
        self,
        x: Any = MISSING,
        task: TaskRef | None = None,
        *,
        split: Split | None = None,
        likeliest: int | None = None,
        **options: Any,
    ) -> Any:
        """The module's output for one task or for a task per sample. Without a task an `Untold`:
        logits for the classes of all tasks and each sample's likeliest task.

        Args:
            x: the module's first argument, if it is not among the options.
            task: a task's name or index, or a tensor of indices or a list of names, one per sample;
                without, a network with a router guesses it.
            split: for a task per sample, along which dimension an option is split by task, or None
                if all samples share it. Without a word, tensors whose first dimension is as long
                as the batch are split.
            likeliest: without a task, ask only so many tasks about each sample: those that look
                likeliest to a router that need not run the network.
            options: the module's other arguments, or all of them: `net(task="a", **batch)`.
        """
        validate.inputs(x, self.dtype, options)
        if task is None:
            return answer(self, x, options, likeliest)
        task = task.tolist() if isinstance(task, np.ndarray) else task
        if isinstance(task, list | tuple):
            task = torch.tensor(self._tasks.indices(task), dtype=torch.long)
        if isinstance(task, Tensor) and task.dim():
            return self._answer_mixed(x, task, split or {}, options)
        known = self._tasks.at(index := self._tasks.index(task))
        if known.rows == known.classes:
            return self._run_for(index, x, options)
        return views.answer(known, x, options, partial(self._run_for, index))

    @run_as_it_is
    def _run_for(self, index: int, x: Any, options: dict[str, Any]) -> Any:
        """The module's output for a task, with all rows that its head has."""
        with active(LEARNING if index == len(self._tasks.tasks) else index):
            return self._run(x, options)

    def _answer_mixed(self, x: Any, task: Tensor, split: Split, options: dict[str, Any]) -> Any:
        # Inputs that are not tensors have no device.
        device = x.device if isinstance(x, Tensor) else self.device

        def run(x: Any, task: Tensor) -> Any:
            return self._mixed.answer(x, task, options, self._run, device, split)

        is_valid = isinstance(x, Tensor) and x.dim() and x.shape[0] == task.shape[0]
        if self._tasks.has_views and is_valid:
            return views.answer_mixed(self._tasks.tasks, x, task, options, run)
        return run(x, task)

    def capture(self, graphs: int = 8) -> "IncrementalNet":
        """Answer mixed batches by CUDA graphs from now on; return the network.

        Then a batch of a shape that came before costs the host one launch instead of one for every
        operation, which is what bounds a large network on a GPU; answers are those without, to
        rounding. It is for answers alone: in eval mode and without gradients, on a GPU, where the
        module takes mixed batches in one pass. All else runs as before. Every shape of batch takes
        memory for its inputs and answers, and its first two answers more time, as do the first
        after each commit. Hooks of the module do not run.

        Args:
            graphs: for how many kinds of batches there are graphs at once; 0 for none.
        """
        if isinstance(graphs, bool) or not isinstance(graphs, int) or graphs < 0:
            raise RankupError(f"capture takes a number of graphs, at least 0, got {graphs!r}")
        self._mixed.graphs = Graphs(self.body, graphs) if graphs else None
        return self

    def describe(self, task: str | int) -> TaskDescription:
        """All that is known about a committed task: its classes' names, how its inputs are
        prepared, how it was learned, from which tasks it selects."""
        return describe(self, self._tasks.committed(task))

    def annotate(self, task: str | int, **known: Any) -> None:
        """Say more about a committed task: its `class_names`, `inputs`, `recipe`, `seed`,
        `samples` or `accuracy` on held-out data; for people a `title`, `description` or `tags`."""
        annotate(self, self._tasks.committed(task), known)

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
        known = self._tasks.tasks[index]
        give_back(module, known.classes)
        if known.views > 1:
            views.answer_in_all_turns(module, known.classes)
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
        """What became of each part of the module, in a table: how many numbers it had, how many a
        task adds, and the share of all numbers that are in matrices with factors."""
        return summary.of_network(self)

    def train(self, mode: bool = True) -> "IncrementalNet":
        super().train(mode)
        self._shared.hold_modes()
        return self

    def extra_repr(self) -> str:
        return f"tasks={self.tasks}, learning={self.learning!r}"

    def __repr__(self) -> str:
        return f"{super().__repr__()}\n{self.summary()}"

    def forget_file(self, task: str) -> None:
        """Mark the file of a task that was removed, for `save` to delete it."""
        if task in self.saved_files:
            self.removed_files.append(self.saved_files.pop(task))

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.saved_files.clear()  # they may not hold what is loaded
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # Checked for all layers before any is changed, so that a refusal leaves all as they were.
        dtypes = {
            d for part in self.layers for d in (part.dtype, part.computes_in, part.base_dtype)
        }
        for dtype in {self.dtype, *dtypes}:
            refuse_other_dtype(fn, dtype)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._shared.tie()
        return self

    @run_as_it_is
    def _run(self, x: Any, options: dict[str, Any]) -> Any:
        try:
            with self._settings.of_one_call(), growing_parameters():
                return call(self.body, *(() if x is MISSING else (x,)), **options)
        except StopIteration:
            raise RankupError(
                "the module's forward takes the first of its parameters, but between tasks a grown "
                "network has none: use x.device or x.dtype there, or a buffer's"
            ) from None

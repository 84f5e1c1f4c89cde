"""Methods that train one dense network: its weights, a head for each task, and how all of it is
saved between tasks."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from rankup import seeds
from rankup.data.tasks import Task
from rankup.errors import RankupError, StoreError
from rankup.growing.copying import copy_of
from rankup.growing.plan import Plan
from rankup.growing.planner import make_plan
from rankup.growing.reinit import redrawn
from rankup.layers import Start, TaskHead, TaskLayer, TaskNorm, Tensors, active, pooled_statistics
from rankup.layers.spec import HeadSpec, LayerSpec, NormSpec
from rankup.methods.base import Method, Setting
from rankup.methods.shared.heads import LearningHeads
from rankup.methods.shared.layout import ANY, Expected, Layout, Layouts
from rankup.methods.shared.weights_file import (
    About,
    has_weights,
    is_unsealed,
    read_weights,
    warn_unsealed,
    write_weights,
)
from rankup.metrics import Footprint, numbers
from rankup.rank import Place
from rankup.training.batches import CALIBRATION, Feed
from rankup.training.engine.learner import Learner
from rankup.training.engine.module import ModuleLearner
from rankup.training.memory_format import for_answers
from rankup.utils.signals import undisturbed
from rankup.utils.torch_modes import evaluating


class DenseMethod(Method):
    """One dense network, trained task after task.

    A method overrides what differs: `learner`, which defines a step; `consolidate`, what to do
    once a task has been learned. What it must remember besides the weights is in `kept`, replayed
    samples are in `buffer`: tensors by name, replaced but never modified in place, saved and
    counted as they are.
    """

    # Norms are shared, with torch's running averages, or each task has its own.
    norms: ClassVar[Literal["shared", "per task"]] = "shared"

    # Old tasks' heads stay as they were learned, or keep learning from replayed samples.
    heads: ClassVar[Literal["frozen", "learning"]] = "frozen"

    def __init__(self, setting: Setting) -> None:
        self.check(setting)
        self.setting = setting
        self.plan = plan = make_plan(setting.module, setting.grow_options)
        if plan.substitutes:
            raise RankupError(
                f"{type(self).__name__} takes modules of plain Linears, convolutions and norms; "
                f"{plan.substituted[0]!r} is of another kind"
            )
        heads = [spec for spec in plan.layers if isinstance(spec, HeadSpec)]
        if len(heads) > 1 or heads[0].taps:
            raise RankupError(f"{type(self).__name__} takes modules with one head, a Linear")
        self.device = plan.device
        layers = (self._task_layer(spec, plan) for spec in plan.layers)
        self.parts = [layer for layer in layers if layer is not None]
        self.head = next(p for p in self.parts if isinstance(p, TaskHead | LearningHeads))
        replaced = {id(setting.module.get_submodule(p.spec.name)): p for p in self.parts}
        self.body = copy_of(setting.module, replaced)
        # The same name for all, so that all of these methods start from the same weights.
        with seeds.seeded_rng(plan.device, seeds.number(setting.seed, "finetune")):
            keeps = setting.grow_options.base == "keep"
            self._take_over(setting.module if keeps else redrawn(setting.module))
        self.kept: Tensors = {}
        self.buffer: Tensors = {}
        self._updating: set[str] = set()  # buffers that their modules update by themselves
        self._feed: Feed | None = None  # of the open task
        self._before: tuple[Tensors, Tensors, Tensors]  # the state that `abandon` restores

    @torch.no_grad()
    def _take_over(self, drawn: nn.Module) -> None:
        """Copy a redrawn module's tensors into the parts of the body that were not replaced."""
        # By all names: a shared tensor's first name may be that of a replaced layer.
        named: Tensors = dict(drawn.named_parameters(remove_duplicate=False))
        named |= dict(drawn.named_buffers(remove_duplicate=False))
        replaced = tuple(f"{layer.spec.name}." for layer in self.parts)
        for name, tensor in chain(self.body.named_parameters(), self.body.named_buffers()):
            if not name.startswith(replaced):
                tensor.copy_(named[name])

    def feed(self, task: Task) -> Feed:
        """The data to learn from when this task comes."""
        return Feed(task, self.recipe, self.device, self.plan.dtype)

    def learner(self, feed: Feed) -> Learner:
        """The learner of the task that was just opened."""
        return ModuleLearner(self.body, feed, self.learned)

    def consolidate(self, feed: Feed) -> None:
        """What to do once the open task has been learned; nothing by default."""

    def shared_parameters(self) -> Tensors:
        """The parameters that all tasks share, by name, detached."""
        shared = self._shared().items()
        return {name: t.detach() for name, t in shared if isinstance(t, nn.Parameter)}

    @property
    def learned(self) -> int:
        return self.head.count

    def begin(self, task: Task) -> Learner:
        feed = self.feed(task)
        state = copy.deepcopy(self.body.state_dict())
        self._before = state, dict(self.kept), dict(self.buffer)
        self._feed = feed
        try:
            for layer in self.parts:
                layer.open(layer.start(task.classes, Start(norms=self.recipe.norms)))
            self.body.train()
            if self.learned and self.norms == "per task":
                self._hold()
            return self.learner(feed)
        except BaseException:
            self.abandon()
            raise

    def predict(self, x: Tensor, task: int) -> Tensor:
        with evaluating(self.body), active(task):
            logits: Tensor = self.body(for_answers(self.body, x))
        return logits

    def end(self) -> None:
        feed = self._feed
        assert feed is not None
        # Weights that stay parameters may be views into a tensor of all that was learned.
        for parameter in self.body.parameters():
            parameter.data = parameter.data.clone()
        self._updating |= self._changed_from(self._before[0])
        self.consolidate(feed)
        draw = seeds.generator(self.seed, "calibrate", self.learned)
        norms = [p for p in self.parts if isinstance(p, TaskNorm) and p.wants_statistics]
        batches = feed.sample(CALIBRATION, draw)
        with pooled_statistics(self.body, norms, batches, lambda x: self.predict(x, self.learned)):
            added = [layer.learned() for layer in self.parts]
        self._append(added)

    def abandon(self) -> None:
        if self._feed is None:
            return
        self._feed = None
        for layer in self.parts:
            layer.close()
        state, self.kept, self.buffer = self._before
        self.body.load_state_dict(state)

    def footprint(self) -> Footprint:
        return Footprint(
            _numbers(self._of_tasks() | self._shared() | self.kept), _numbers(self.buffer)
        )

    def saving(self, folder: Path) -> Callable[[], None]:
        groups = {"shared": self._shared(), "kept": self.kept, "buffer": self.buffer}
        tensors = {
            f"{group}/{name}": t for group, named in groups.items() for name, t in named.items()
        }
        tensors |= self._of_tasks()
        about = About(self._who, self.learned)

        def write() -> None:
            copies = {n: t.detach().to("cpu", copy=True).contiguous() for n, t in tensors.items()}
            try:
                write_weights(folder, copies, about)
            except OSError as error:
                there = "what was saved there before is whole"
                raise StoreError(
                    f"cannot save to {folder}: {error.strerror or error}; "
                    + (there if self.is_in(folder) else "nothing was saved")
                ) from error

        return write

    @classmethod
    def is_in(cls, folder: Path) -> bool:
        return has_weights(folder)

    @classmethod
    def load(cls, folder: Path, setting: Setting) -> Self:
        if is_unsealed(folder):
            warn_unsealed(folder)
        return cls._loaded(folder, setting)

    @classmethod
    def _loaded(cls, folder: Path, setting: Setting) -> Self:
        method = cls(setting)
        saved = read_weights(folder, method._who)
        groups: dict[str, Tensors] = {}
        for name, tensor in saved.tensors.items():
            group, _, rest = name.partition("/")
            groups.setdefault(group, {})[rest] = tensor.to(method.device)
        learned = len(_tasks_in(saved.tensors)) if saved.tasks is None else saved.tasks
        misfit = f"{saved.path} does not hold what this method, network and stream need"
        try:
            method.check_saved(saved.tensors, learned)
        except ValueError as error:
            raise StoreError(f"{misfit}: {error}") from error
        try:
            method._take(groups)
        except (ValueError, RuntimeError, LookupError, TypeError) as error:
            raise StoreError(misfit) from error  # of what a method does not say that it needs
        return method

    @property
    def _who(self) -> str:
        """Recorded in its files, so that no other seed or method takes them for its own."""
        return f"{type(self).__name__} with seed {self.seed}"

    def check_saved(self, tensors: Tensors, learned: int) -> None:
        """Refuse, by a `ValueError`, tensors that it cannot have saved after so many tasks."""
        # Each task has a head. First, or many tasks that are not there would take long to expect.
        if (there := len(_tasks_in(tensors))) != learned:
            raise ValueError(f"it holds {there} tasks, expected {learned}")
        if learned > (count := len(self.setting.tasks)) and isinstance(self.head, LearningHeads):
            raise ValueError(f"it holds {learned} tasks, but the stream has {count}")
        expected = Expected()
        positive = {id(t) for module in self.body.modules() for t in _never_negative(module)}
        shared = {
            name: Layout.like(t, least=0 if id(t) in positive else -math.inf)
            for name, t in self._shared().items()
        }
        expected.add("shared/", shared)
        kept = self.kept_layouts(learned)
        for group in ("kept/", "buffer/") if kept is None else ():
            expected.add(group, None)
        expected.add("", kept or {})
        for index in range(learned):
            for layer in self.parts:
                layouts = self.layer_layouts(layer, index, learned)
                expected.add(f"{index}/{layer.spec.name}.", layouts)
        expected.check(tensors)

    def kept_layouts(self, learned: int) -> Layouts | None:
        """What `kept` and `buffer` must be like after so many tasks, by names that begin with
        `kept/` or `buffer/`; by default not known, so that all finite numbers are taken."""
        return None

    def layer_layouts(self, layer: TaskLayer, task: int, learned: int) -> Layouts | None:
        """What a layer must have stored of a task; None if that is not known."""
        dtype, tasks = self.plan.dtype, self.setting.tasks
        if isinstance(layer, TaskNorm):
            shapes = layer.spec.shapes(Place.number(task), 0).items()
            return {k: Layout(s, dtype, least=0 if k == "var" else -math.inf) for k, s in shapes}
        if not isinstance(layer, TaskHead | LearningHeads):
            return None
        classes = tasks[task].classes if task < len(tasks) else ANY
        layouts = {"weight": Layout((classes, layer.spec.inputs), dtype)}
        return layouts | {"bias": Layout((classes,), dtype)} if layer.spec.bias else layouts

    def _take(self, groups: dict[str, Tensors]) -> None:
        """Take over the saved state."""
        self._updating = self._changed_from(groups.get("shared", {}))
        with torch.no_grad():
            for name, tensor in self._shared().items():
                tensor.copy_(groups["shared"][name])
        self.kept, self.buffer = groups.get("kept", {}), groups.get("buffer", {})
        while (of_task := groups.get(str(self.learned))) is not None:
            starts = [f"{layer.spec.name}." for layer in self.parts]
            self._append(
                [
                    {k.removeprefix(start): t for k, t in of_task.items() if k.startswith(start)}
                    for start in starts
                ]
            )

    def _changed_from(self, values: Tensors) -> set[str]:
        """The shared buffers whose values now differ."""
        return {
            name
            for name, tensor in self._shared().items()
            if not isinstance(tensor, nn.Parameter) and not torch.equal(tensor, values[name])
        }

    def _hold(self) -> None:
        """Stop modules from updating their buffers once tasks depend on them, through their
        `training` flag; their submodules are left alone."""
        for name in self._updating:
            self.body.get_submodule(name.rpartition(".")[0]).training = False

    def _task_layer(self, spec: LayerSpec, plan: Plan) -> TaskLayer | None:
        """The per-task layer in place of this one, if any."""
        factory = self.seed, plan.dtype, plan.device
        if isinstance(spec, HeadSpec):
            if self.heads == "frozen":
                return TaskHead(spec, *factory)
            return LearningHeads(spec, [task.classes for task in self.setting.tasks], *factory)
        if isinstance(spec, NormSpec) and self.norms == "per task":
            return TaskNorm(spec, *factory)
        return None

    def _append(self, added: Sequence[Tensors]) -> None:
        extended = [layer.extended(new) for layer, new in zip(self.parts, added, strict=True)]
        with undisturbed():
            for layer, tables in zip(self.parts, extended, strict=True):
                layer.close()
                layer.install(tables)
            self._feed = None  # in here, so that Ctrl-C never abandons what is appended

    def _of_tasks(self) -> Tensors:
        """The tensors that belong to each learned task, by its index."""
        return {
            f"{index}/{layer.spec.name}.{key}": tensor
            for index in range(self.learned)
            for layer in self.parts
            for key, tensor in layer.added(index).items()
        }

    def _shared(self) -> Tensors:
        """Weights and statistics that all tasks share, each listed once."""
        known = {
            id(t) for p in self.parts for t in nn.Module.state_dict(p, keep_vars=True).values()
        } | {id(t) for module in self.body.modules() for t in _counters(module)}
        shared: Tensors = {}
        for name, tensor in self.body.state_dict(keep_vars=True).items():
            if id(tensor) not in known:
                known.add(id(tensor))
                shared[name] = tensor
        return shared


def _tasks_in(names: Iterable[str]) -> set[str]:
    """The tasks that tensors of these names belong to."""
    return {group for group in (name.partition("/")[0] for name in names) if group.isdecimal()}


def _counters(module: nn.Module) -> Iterator[Tensor]:
    """How many batches a norm has seen, where that changes nothing it computes."""
    if isinstance(module, _NormBase) and module.momentum is not None:
        yield from (t for key, t in module.named_buffers() if key == "num_batches_tracked")


def _never_negative(module: nn.Module) -> Iterator[Tensor]:
    """A norm's variances and counters."""
    if isinstance(module, _NormBase):
        yield from (t for key, t in module.named_buffers() if key != "running_mean")


def _numbers(tensors: Tensors) -> float:
    return numbers(sum(tensor.nbytes for tensor in tensors.values()))

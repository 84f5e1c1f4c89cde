"""The base of methods that train one dense network with a head for each task, and how such a method
is stored."""

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

    Subclasses override `learner`, which defines a step, and `consolidate`, which is called when a
    task has been learned.

    Attributes:
        norms: whether tasks share norms, with torch's running averages, or each has its own.
        heads: whether heads of learned tasks are frozen, or keep learning from replayed samples.
        body: the network, a copy of the setting's module with per-task layers.
        parts: its per-task layers.
        head: the one of them that has the heads.
        kept: what the method must remember besides the weights: tensors by name, stored and counted
            as they are. They may be replaced, but must not be modified in place.
        buffer: the same of replayed samples.
    """

    norms: ClassVar[Literal["shared", "per task"]] = "shared"
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
        # "finetune" whatever the method, so that all of them start from the same weights.
        with seeds.seeded_rng(plan.device, seeds.number(setting.seed, "finetune")):
            keeps = setting.grow_options.base == "keep"
            self._copy_from(setting.module if keeps else redrawn(setting.module))
        self.kept: Tensors = {}
        self.buffer: Tensors = {}
        self._updating: set[str] = set()  # names of buffers that modules update in training
        self._feed: Feed | None = None  # of the open task
        self._before: tuple[Tensors, Tensors, Tensors]  # the state that `abandon` restores

    @torch.no_grad()
    def _copy_from(self, module: nn.Module) -> None:
        """Copy a module's tensors to the body, except for the layers that were replaced."""
        # With duplicates, because a shared tensor's first name may be that of a replaced layer.
        named: Tensors = dict(module.named_parameters(remove_duplicate=False))
        named |= dict(module.named_buffers(remove_duplicate=False))
        replaced = tuple(f"{layer.spec.name}." for layer in self.parts)
        for name, tensor in chain(self.body.named_parameters(), self.body.named_buffers()):
            if not name.startswith(replaced):
                tensor.copy_(named[name])

    def feed(self, task: Task) -> Feed:
        """The data that a task is learned from."""
        return Feed(task, self.recipe, self.device, self.plan.dtype)

    def learner(self, feed: Feed) -> Learner:
        """A learner for the open task."""
        return ModuleLearner(self.body, feed, self.learned)

    def consolidate(self, feed: Feed) -> None:
        """Update the method's own state when the open task has been learned; by default nothing."""

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
                self._freeze_buffers()
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
        # Parameters may be views of one tensor that has everything that was learned.
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
            _numbers(self._task_tensors() | self._shared() | self.kept), _numbers(self.buffer)
        )

    def saving(self, folder: Path) -> Callable[[], None]:
        groups = {"shared": self._shared(), "kept": self.kept, "buffer": self.buffer}
        tensors = {
            f"{group}/{name}": t for group, named in groups.items() for name, t in named.items()
        }
        tensors |= self._task_tensors()
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
            raise StoreError(misfit) from error  # the method does not state its layouts
        return method

    @property
    def _who(self) -> str:
        """How its files name the method and seed, so that no other one loads them."""
        return f"{type(self).__name__} with seed {self.seed}"

    def check_saved(self, tensors: Tensors, learned: int) -> None:
        """Raise `ValueError` for tensors that it cannot have saved after `learned` tasks."""
        # First, because a large wrong number of tasks would make the following take long.
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
        """The layouts of `kept` and `buffer` after `learned` tasks, under names that begin with
        `kept/` or `buffer/`. By default None: they are not known, and any finite tensors are
        accepted."""
        return None

    def layer_layouts(self, layer: TaskLayer, task: int, learned: int) -> Layouts | None:
        """The layouts of the tensors that a layer stores of a task; None if they are not known."""
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
        """Restore the saved state from tensors by the first part of their names and the rest."""
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
        """The names of shared buffers whose values differ from these."""
        return {
            name
            for name, tensor in self._shared().items()
            if not isinstance(tensor, nn.Parameter) and not torch.equal(tensor, values[name])
        }

    def _freeze_buffers(self) -> None:
        """Put modules that update their buffers in training, but not their submodules, into eval
        mode, because learned tasks depend on these buffers."""
        for name in self._updating:
            self.body.get_submodule(name.rpartition(".")[0]).training = False

    def _task_layer(self, spec: LayerSpec, plan: Plan) -> TaskLayer | None:
        """The per-task layer that replaces one of the module's, or None to share it."""
        factory = self.seed, plan.dtype, plan.device
        if isinstance(spec, HeadSpec):
            if self.heads == "frozen":
                return TaskHead(spec, *factory)
            return LearningHeads(spec, [task.classes for task in self.setting.tasks], *factory)
        if isinstance(spec, NormSpec) and self.norms == "per task":
            return TaskNorm(spec, *factory)
        return None

    def _append(self, added: Sequence[Tensors]) -> None:
        """Append a task to the tables of all per-task layers.

        Args:
            added: the tensors that each of `parts` adds.
        """
        extended = [layer.extended(new) for layer, new in zip(self.parts, added, strict=True)]
        with undisturbed():
            for layer, tables in zip(self.parts, extended, strict=True):
                layer.close()
                layer.install(tables)
            self._feed = None  # in here, so that Ctrl-C cannot abandon an appended task

    def _task_tensors(self) -> Tensors:
        """The tensors of each learned task, named `index/layer.key`."""
        return {
            f"{index}/{layer.spec.name}.{key}": tensor
            for index in range(self.learned)
            for layer in self.parts
            for key, tensor in layer.added(index).items()
        }

    def _shared(self) -> Tensors:
        """The parameters and buffers that all tasks share, by name; tied ones are listed once."""
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
    """The indices, as text, of the tasks that tensors of these names belong to."""
    return {group for group in (name.partition("/")[0] for name in names) if group.isdecimal()}


def _counters(module: nn.Module) -> Iterator[Tensor]:
    """A norm's counter of batches, if its output does not depend on it."""
    if isinstance(module, _NormBase) and module.momentum is not None:
        yield from (t for key, t in module.named_buffers() if key == "num_batches_tracked")


def _never_negative(module: nn.Module) -> Iterator[Tensor]:
    """A norm's variances and counters."""
    if isinstance(module, _NormBase):
        yield from (t for key, t in module.named_buffers() if key != "running_mean")


def _numbers(tensors: Tensors) -> float:
    return numbers(sum(tensor.nbytes for tensor in tensors.values()))

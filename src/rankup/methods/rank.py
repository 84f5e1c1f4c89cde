"""Incremental rank updates (Hyder et al., *Incremental Task Learning with Incremental Rank
Updates*, ECCV 2022): the method that this package is about.

For task t the weight of a layer is

    W_t = Σ_i s_{i,t} · u_i v_iᵀ

over the factors of all tasks up to t. A task learns a few new factors, its selector s_t over all
of them, and its head; what earlier tasks have learned is frozen, so nothing is forgotten.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from rankup.data.tasks import Task
from rankup.errors import RankupError, StoreError
from rankup.growing.options import GrowOptions
from rankup.growing.routing import RouterRule
from rankup.methods.base import Method, Setting
from rankup.methods.options import RankOptions
from rankup.metrics import Footprint, numbers
from rankup.net.guess import Untold
from rankup.net.network import IncrementalNet
from rankup.rank import Rank
from rankup.storage.manifest import MANIFEST, Manifest, is_of_network
from rankup.storage.seal import SealError, opened
from rankup.storage.store import load, save
from rankup.training.engine.learner import Learner
from rankup.training.fit import NetPupil
from rankup.training.memory_format import for_answers
from rankup.utils.files import read_regular
from rankup.utils.torch_modes import evaluating


class RankUpdate(Method):
    """Trains an `IncrementalNet` on a stream, as `rankup.fit` trains one on a single task.

    Attributes:
        net: the network, with all tasks learned so far.
    """

    def __init__(self, setting: Setting) -> None:
        self._set_up(setting, IncrementalNet(setting.module, _grow_options(setting)))

    @classmethod
    def check(cls, setting: Setting) -> None:
        if teacher := setting.options_of(RankOptions).teacher:
            _check_teacher(Path(teacher), setting)

    def _set_up(self, setting: Setting, net: IncrementalNet) -> None:
        self.setting, self.net = setting, net
        options, teacher = setting.options_of(RankOptions), None
        folder = options.teacher
        if folder and self.learned < len(setting.tasks):
            teacher = load(_teacher_folder(Path(folder), setting.seed)).to(net.device)
        self._pupil = NetPupil(
            net, setting.recipe, setting.seed, options.reuse, teacher, options.uses
        )

    @property
    def learned(self) -> int:
        return len(self.net.tasks)

    @property
    def draws_by(self) -> int | str:
        return self._pupil.draws_by

    def begin(self, task: Task) -> Learner:
        return self._pupil.begin(task)

    def predict(self, x: Tensor, task: int) -> Tensor:
        return self._pupil.predict(x, task)

    def untold(self, x: Tensor) -> Untold:
        if self.net.router is None:
            return super().untold(x)
        with evaluating(self.net):
            answer: Untold = self.net(for_answers(self.net.body, x))
        return answer

    def end(self) -> None:
        self._pupil.end()

    def abandon(self) -> None:
        self._pupil.abandon()

    def footprint(self) -> Footprint:
        return Footprint(parameters=numbers(self.net.size().bytes))

    def saving(self, folder: Path) -> Callable[[], None]:
        # Committed tasks never change, so there is nothing to capture now.
        return lambda: save(self.net, folder)

    @classmethod
    def is_in(cls, folder: Path) -> bool:
        return (folder / MANIFEST).exists()

    @classmethod
    def load(cls, folder: Path, setting: Setting) -> Self:
        method = cls.__new__(cls)
        net = load(folder, setting.module)
        _refuse_other_tasks(folder, net, setting)
        method._set_up(setting, net.to(next(setting.module.parameters()).device))
        return method


def _refuse_other_tasks(folder: Path, net: IncrementalNet, setting: Setting) -> None:
    """Refuse a network whose tasks are not the first ones of the stream: others may have been
    added to it since."""
    expected = {task.name: task.classes for task in setting.tasks}
    known = list(net.classes.items())
    if known != (wanted := list(expected.items())[: len(known)]):
        name = next(n for n, pair in enumerate(known) if wanted[n : n + 1] != [pair])
        raise StoreError(
            f"{folder} holds a task {known[name][0]!r} where the stream has "
            + (f"{wanted[name][0]!r}" if name < len(wanted) else "no more")
            + ": begin a new run with --out, and teach a copy of a run's network, not the "
            "network itself"
        )


def _check_teacher(folder: Path, setting: Setting) -> None:
    """Refuse a teacher that has not learned the tasks of this stream, drawn with the same seed, or
    that expects other inputs."""
    home = _teacher_folder(folder, setting.seed)
    manifest = Manifest.read(home)
    if manifest.options.seed != setting.seed:
        raise RankupError(
            f"the teacher {folder} learned its tasks with seed {manifest.options.seed}, and with "
            f"seed {setting.seed} the tasks are different"
        )
    pixels = _pixels_of(home.parent)
    if pixels not in (None, setting.recipe.pixels):
        raise RankupError(
            f"the teacher {folder} learned from pixels {pixels!r}, but would be asked with pixels "
            f"{setting.recipe.pixels!r}"
        )
    known = {task.name: task.classes for task, _ in manifest.tasks}
    for task in setting.tasks:
        if known.get(task.name) != task.classes:
            raise RankupError(f"the teacher {folder} has not learned task {task.name!r}")
    _refuse_other_inputs(home, folder, setting.tasks[0].to("cpu"))


def _refuse_other_inputs(home: Path, folder: Path, task: Task) -> None:
    """Refuse a teacher that cannot take a task's inputs: tasks of different streams may have the
    same names."""
    try:
        net = load(home)
    except StoreError:
        return  # a finished run needs no teacher; any other one reports this when it loads it
    x = torch.zeros(2, *task.train_x.shape[1:], dtype=net.dtype)
    try:
        with torch.no_grad():
            net(x if task.transform is None else task.transform(x), task.name)
    except (RankupError, RuntimeError):
        raise RankupError(
            f"the teacher {folder} learned a different stream: it cannot answer inputs of shape "
            f"{list(task.train_x.shape[1:])}"
        ) from None


def _pixels_of(run: Path) -> object:
    """The setting `pixels` of a run's recipe; None for a network outside of a run."""
    path = run / "config.json"
    if not path.exists():
        return None
    try:
        return opened(json.loads(read_regular(path)), path, run)[0]["recipe"].get("pixels")
    except SealError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise RankupError(f"{path} does not hold the settings of a run") from None


def _teacher_folder(folder: Path, seed: int) -> Path:
    """The folder of a teacher's network: in a run's folder, in that of one of its seeds, or the
    folder itself."""
    candidates = (folder / f"seed-{seed}" / "net", folder / "net", folder)
    for candidate in candidates:
        if is_of_network(candidate):
            return candidate
    raise RankupError(
        f"the teacher {folder} is not the folder of a run by the rank update, and has none for "
        f"seed {seed} in it"
    )


def _grow_options(setting: Setting) -> GrowOptions:
    """How to grow the module: the setting's options, changed by those of the method."""
    options = setting.options_of(RankOptions)
    last = options.last or setting.grow_options.last
    router = RouterRule.parse(options.router) if options.router else None
    rank = setting.grow_options.rank
    if options.prune:
        assert isinstance(rank, Rank)  # as the command line writes it
        rank = replace(rank, prune=options.tolerance)
    return replace(setting.grow_options, rank=rank, last=last, store=options.store, router=router)

"""Learning a stream with a method, in a run folder from which it can be resumed at any time.

config.json    what was asked for, enough to repeat it
metrics.jsonl  a line per task learned
net/           what the method knows
checkpoint.safetensors   the task being learned, after its last finished epoch
"""

import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rankup
from rankup import models
from rankup.data.streams import Stream
from rankup.data.tasks import Task
from rankup.data.transforms import check_pad
from rankup.growing.options import GrowOptions
from rankup.methods import method_class, method_info, method_options
from rankup.methods.base import Method, Setting
from rankup.metrics import AccuracyMatrix
from rankup.rank import parse_rank
from rankup.runs.checkpoints import CHECKPOINT, SHARE, Checkpoints, read_checkpoint
from rankup.runs.folder import (
    RunConfig,
    RunError,
    check_folder,
    record_torch,
    working_in,
    write_config,
    write_lines,
)
from rankup.runs.records import METRICS, NET, read_lines, recipe_of
from rankup.training.batches import Feed
from rankup.training.checkpoint import Checkpoint, CheckpointError
from rankup.training.engine.select import Engine
from rankup.training.evaluate import share_right
from rankup.training.loop import Epoch, OnEpoch, TaskFailed, learn
from rankup.utils.malloc import keep_freed_memory

_TELL = 0.5  # least number of seconds between two progress reports


@dataclass(frozen=True)
class Progress:
    """How far a seed is, along with those trained together with it."""

    seed: int
    seeds: int  # how many
    task: int  # its index
    epoch: int  # epochs done
    epochs: int
    loss: float
    accuracy: float  # on a sample of the training data


OnProgress = Callable[[Progress], None]


def run(
    config: RunConfig,
    stream: Stream,
    out: Path,
    *,
    resume: bool = False,
    on_progress: OnProgress | None = None,
) -> None:
    """Learn all tasks of a stream that are not learned yet."""
    failures = run_together([SeedRun(config, stream, out, resume)], on_progress=on_progress)
    for failure in failures.values():
        raise failure


def run_together(
    runs: "Sequence[SeedRun]",
    *,
    on_progress: OnProgress | None = None,
    note: Callable[[str], None] = warnings.warn,
) -> dict[Path, TaskFailed]:
    """Let several runs learn their streams at once, in one process.

    Returns why any runs failed, by folder; the others go on without them.
    """
    torch.set_num_threads(runs[0].config.threads)
    torch.backends.cudnn.deterministic = True  # the same seed, the same numbers
    if runs[0].config.device == "cpu":
        keep_freed_memory()
    alike = len({r.config.but_for_its_seed() for r in runs}) == 1
    engine, failures = Engine(note, alike=alike), dict[Path, TaskFailed]()
    checkpoints = Checkpoints(note)
    with working_in(r.out for r in runs if not r.finished):
        for each in runs:
            each.refuse_if_outdated()
            if not each.finished:
                record_torch(each.config, each.out)
        while going := [r for r in runs if not r.finished and r.out not in failures]:
            # Runs that were stopped at different tasks catch up first.
            next_task = min(len(r.lines) for r in going)
            failures |= _learn_next(
                [r for r in going if len(r.lines) == next_task], engine, checkpoints, on_progress
            )
    return failures


def _learn_next(
    runs: "Sequence[SeedRun]",
    engine: Engine,
    checkpoints: Checkpoints,
    on_progress: OnProgress | None,
) -> dict[Path, TaskFailed]:
    started, before = time.perf_counter(), 0.0

    def seconds() -> float:
        """Seconds that the task has taken in total; runs that learn together share them."""
        return before + (time.perf_counter() - started) / len(runs)

    # The others had already saved the task when they were stopped, or learn all tasks at once.
    learning = [r for r in runs if r.method.learned == len(r.lines)]
    failures: list[TaskFailed | None] = []
    if learning:
        methods, tasks = [r.method for r in learning], [r.next_task for r in learning]
        watches = [
            # Only one of them reports, for all: reporting takes time.
            r.watch(checkpoints, seconds, on_progress if r is learning[0] else None, len(learning))
            for r in learning
        ]
        found = [read_checkpoint(r.out, len(r.lines), engine.note) for r in learning]
        before = max(0.0 if point is None else point.seconds for point in found)
        try:
            failures = learn(methods, tasks, engine, found, watches)
        except CheckpointError as error:
            engine.note(f"task {tasks[0].name!r} starts over: {error}")
            before = 0.0
            failures = learn(methods, tasks, engine, None, watches)
    failed = {r.out: why for r, why in zip(learning, failures, strict=True) if why is not None}
    # If a run was stopped just after a task was saved, the time spent learning it is lost.
    _record([r for r in runs if r.out not in failed], seconds())
    return failed


def _record(runs: "Sequence[SeedRun]", seconds: float) -> None:
    """Save what was learned, test all tasks, write a line, for every run."""
    if not runs:
        return
    # Disks are slow, so what was learned is saved while it is tested. Tests are not worth threads:
    # Python runs one at a time, and switching takes longer than waiting for a GPU.
    with ThreadPoolExecutor(len(runs)) as pool:
        # Tests may replace a network's tensors, so what is to be saved is captured before them.
        saved = [pool.submit(write) for write in [r.saving() for r in runs]]
        tested = [r.test() for r in runs]
        for each in saved:
            each.result()
        list(pool.map(lambda r, row: r.note(row, seconds), runs, tested))


class SeedRun:
    """One seed's run folder, and what it holds in memory.

    Args:
        only_look: leave the folder alone, just to see whether the run can go on there.
    """

    def __init__(
        self,
        config: RunConfig,
        stream: Stream,
        out: Path,
        resume: bool = False,
        *,
        only_look: bool = False,
    ) -> None:
        device = torch.device(config.device)
        self.config, self.out, self.stream = config, out, stream.to(device)
        setting = setting_of(config, self.stream)
        kind, folder = method_class(config.method), out / NET
        kind.check(setting)
        check_folder(config, out, resume)
        self.method = kind.load(folder, setting) if kind.is_in(folder) else kind(setting)
        self.tests = [Feed(task, setting.recipe, device) for task in self.stream]
        self.lines = read_lines(out)
        self.matrix = AccuracyMatrix([line["accuracy"] for line in self.lines])
        self._refuse_mixed_up()
        # Last, so that a refused run leaves no folder in the way of another try.
        if not only_look:
            write_config(config, out)

    def _refuse_mixed_up(self) -> None:
        """Refuse a network that has learned neither as many tasks as there are lines nor one more:
        it would be tested in place of another."""
        learned, told = self.method.learned, len(self.lines)
        again = "put back what is missing, or start a new run with --out"
        if learned < told:
            raise RunError(
                f"{self.out / NET} lacks tasks that {METRICS} has (it holds {learned} of {told}): "
                f"{again}"
            )
        if learned > told + 1 and method_info(self.config.method).continual:
            raise RunError(
                f"{self.out / METRICS} lacks tasks that {NET}/ has (it lists {told} of "
                f"{learned}): {again}"
            )

    def refuse_if_outdated(self) -> None:
        if len(read_lines(self.out)) != len(self.lines):
            raise RunError(
                f"another process was using {self.out} until just now: run the same command "
                "with --resume to continue from there"
            )

    @property
    def finished(self) -> bool:
        return len(self.lines) == len(self.stream)

    @property
    def next_task(self) -> Task:
        return self.stream[len(self.lines)]

    def watch(
        self,
        checkpoints: Checkpoints,
        seconds: Callable[[], float],
        on_progress: OnProgress | None,
        seeds: int,
    ) -> OnEpoch:
        """Writes checkpoints and reports progress, both seldom enough to cost little."""
        index, told, telling = len(self.lines), 0.0, 0.0

        def on_epoch(epoch: Epoch, checkpoint: Checkpoint) -> None:
            nonlocal told, telling
            checkpoint.seconds = seconds()
            checkpoints.keep(self.out, index, checkpoint)
            now = time.perf_counter()
            if on_progress is not None and now - told > max(_TELL, SHARE * telling):
                numbers = epoch.number, epoch.epochs, epoch.loss, epoch.accuracy()
                on_progress(Progress(self.config.seed, seeds, index, *numbers))
                told = time.perf_counter()
                telling = told - now

        return on_epoch

    def saving(self) -> Callable[[], None]:
        return self.method.saving(self.out / NET)

    def test(self) -> list[float]:
        """The accuracy on every learned task."""
        return [
            share_right(lambda x, task=task: self.method.predict(x, task), self.tests[task].test())  # type: ignore[misc]
            for task in range(len(self.lines) + 1)
        ]

    def note(self, accuracies: list[float], seconds: float) -> None:
        """Write the line of a task that was learned and saved."""
        self.matrix.add(accuracies)
        index = len(self.lines)
        self.lines.append(_line(self.stream[index], self.matrix, self.method, seconds))
        write_lines(self.out, self.lines)
        (self.out / CHECKPOINT).unlink(missing_ok=True)


def setting_of(config: RunConfig, stream: Stream) -> Setting:
    """What the run's method is made from."""
    recipe = recipe_of(config.recipe)
    for task in stream if recipe.crop else ():
        check_pad(recipe.crop, task.train_x.shape)
    module = make_module(config, stream[0]).to(stream[0].train_x.device)
    options = method_options(config.method, config.options)
    return Setting(module, grow_options_of(config), recipe, config.seed, stream.tasks, options)


def make_module(config: RunConfig, task: Task) -> nn.Module:
    """The network that the tasks' inputs fit into."""
    shape = task.train_x.shape[1:]
    if config.net == "mlp":
        return models.mlp(shape.numel(), hidden=[config.width, config.width])
    if len(shape) != 3:
        raise RunError(f"resnet18 takes images, got inputs of shape {list(shape)}")
    return models.resnet18(config.width, image_size=shape[-1], channels=shape[0])


def grow_options_of(config: RunConfig) -> GrowOptions:
    return GrowOptions(parse_rank(config.rank, config.seeded), seed=config.seed)


def versions() -> dict[str, str]:
    return {"rankup": rankup.__version__, "torch": torch.__version__}


def _line(task: Task, matrix: AccuracyMatrix, method: Method, seconds: float) -> dict[str, Any]:
    footprint = method.footprint()
    return {
        "task": task.name,
        "classes": list(task.class_names),
        "accuracy": matrix.rows[-1],
        "average_accuracy": matrix.average_accuracy(),
        "forgetting": matrix.forgetting(),
        "parameters": footprint.parameters,
        "buffer": footprint.buffer,
        "seconds": seconds,
    }

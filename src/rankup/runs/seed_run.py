"""One seed's run: its settings, its stream, its method and its folder."""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

import rankup
from rankup.data.heldout import hold_out
from rankup.data.inputs import from_json
from rankup.data.streams import Stream, make_stream
from rankup.data.tasks import Task
from rankup.data.transforms import check_pad
from rankup.growing.options import GrowOptions
from rankup.methods import method_class, method_options
from rankup.methods.base import Method, Setting
from rankup.metrics import AccuracyMatrix
from rankup.net.network import IncrementalNet
from rankup.rank import parse_rank
from rankup.runs.checkpoints import (
    CHECKPOINT,
    SHARE,
    Checkpoints,
    OpenTask,
    read_checkpoint,
)
from rankup.runs.curves import Curves
from rankup.runs.folder import (
    RunConfig,
    RunError,
    check_folder,
    record_torch,
    write_config,
    write_lines,
)
from rankup.runs.nets import make_module
from rankup.runs.records import NET, read_lines, recipe_of, refuse_mixed_up
from rankup.runs.untold import is_domain_incremental, test_untold
from rankup.training.batches import Feed
from rankup.training.checkpoint import Checkpoint
from rankup.training.evaluate import fraction_correct
from rankup.training.logs import Tool
from rankup.training.loop import Epoch, OnEpoch

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


@dataclass(eq=False)
class SeedRun:
    """One seed's run: its settings, its stream and its folder.

    What it works with is made when it is first needed, and stays behind when the run is sent to
    another process.

    Args:
        preloaded: its stream, if it is already made.
        out: its folder; None to write nothing.
        resume: whether it may continue what is in its folder.
        data: the folder of data sets that its stream is made from.
        until: after how many tasks to stop, if not after all.
        log: what to draw curves with.
    """

    config: RunConfig
    preloaded: Stream | None
    out: Path | None
    resume: bool = False
    data: Path | None = None
    until: int | None = None
    log: Tool | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @cached_property
    def stream(self) -> Stream:
        """Its tasks, on its device."""
        stream = self._make_stream() if self.preloaded is None else self.preloaded
        return stream.to(self.config.device)

    @cached_property
    def setting(self) -> Setting:
        """What its method is made from."""
        config, first, recipe = self.config, self.stream[0], recipe_of(self.config.recipe)
        for task in self.stream if recipe.crop else ():
            check_pad(recipe.crop, task.train_x.shape)
        return Setting(
            module=make_module(config, first).to(first.train_x.device),
            grow_options=GrowOptions(
                parse_rank(config.rank, config.seeded),
                base="keep" if config.pretrained else "new",
                seed=config.seed,
            ),
            recipe=recipe,
            seed=config.seed,
            tasks=self.stream.tasks,
            options=method_options(config.method, config.options),
        )

    @cached_property
    def method(self) -> Method:
        kind = method_class(self.config.method)
        if self.out is not None and kind.is_in(self.out / NET):
            return kind.load(self.out / NET, self.setting)
        return kind(self.setting)

    @cached_property
    def curves(self) -> Curves:
        return Curves(self.log, self.config, self.out)

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """What `metrics.jsonl` says: a line per task learned."""
        return [] if self.out is None else read_lines(self.out)

    @cached_property
    def matrix(self) -> AccuracyMatrix:
        return AccuracyMatrix([line["accuracy"] for line in self.lines])

    @cached_property
    def _tests(self) -> list[Feed]:
        device = torch.device(self.config.device)
        return [Feed(task, self.setting.recipe, device) for task in self.stream]

    @property
    def folder(self) -> Path:
        assert self.out is not None
        return self.out

    @property
    def learned(self) -> int:
        """How many tasks were learned, by this process or another, as its folder says."""
        return len(read_lines(self.folder))

    @property
    def unfinished(self) -> bool:
        return self.learned < (self.until or self.config.tasks)

    @property
    def finished(self) -> bool:
        return len(self.lines) >= (self.until or len(self.stream))

    @property
    def next_task(self) -> Task:
        return self.stream[len(self.lines)]

    @property
    def open_task(self) -> OpenTask:
        """The next task, as checkpoints name it."""
        config = self.config
        return OpenTask(len(self.lines), self.next_task.name, config.seed, config.recipe)

    def _make_stream(self) -> Stream:
        config = self.config
        count = config.tasks_in_stream or config.tasks
        made_by = config.preprocessing
        whole = make_stream(
            config.stream,
            tasks=count,
            seed=config.seed,
            data=self.data,
            progress=False,
            inputs=None if made_by is None else from_json(made_by),
            per_class=config.per_class,
        )
        learned = whole.first(config.tasks)
        return hold_out(learned, config.held_out, config.seed) if config.held_out else learned

    def check(self) -> None:
        """Refuse a run that can neither begin nor go on. Writes nothing."""
        method_class(self.config.method).check(self.setting)
        if self.out is not None:
            check_folder(self.config, self.out, self.resume)
            learned, listed = self.method.learned, len(self.lines)
            refuse_mixed_up(self.out, self.config.method, learned, listed)

    def open(self) -> None:
        """Check it, and make its folder: last, so that a refused run leaves none in the way of
        another try."""
        self.check()
        if self.out is not None:
            write_config(self.config, self.out)

    def refuse_if_outdated(self) -> None:
        """Refuse to work with what was read before the folder was locked, if it has changed. The
        caller must hold the lock."""
        if self.out is None:
            return
        if self.learned != len(self.lines):
            raise RunError(
                f"another process was using {self.out} until just now: run the same command "
                "with --resume to continue from there"
            )
        if not self.finished:
            record_torch(self.config, self.out)

    @property
    def has_checkpoint(self) -> bool:
        return self.out is not None and (self.out / CHECKPOINT).is_file()

    def drop_old_checkpoint(self) -> None:
        """Remove what is left of a run that was killed between its last line and its end. The
        caller must hold the lock."""
        if self.finished and self.has_checkpoint:
            (self.folder / CHECKPOINT).unlink(missing_ok=True)

    def warn_if_capped(self) -> None:
        """Warn where a task gets less rank than was asked for, as `grow` does."""
        net = getattr(self.method, "net", None)
        if isinstance(net, IncrementalNet):
            net.plan.warn(net.options)

    def checkpoint(self, note: Callable[[str], None]) -> Checkpoint | None:
        """Where the next task was stopped, if it was."""
        return None if self.out is None else read_checkpoint(self.out, self.open_task, note)

    def watch(
        self,
        checkpoints: Checkpoints,
        seconds: Callable[[], float],
        on_progress: OnProgress | None,
        seeds: int,
    ) -> OnEpoch:
        """Writes checkpoints and reports progress, both seldom enough to cost little."""
        task, reported, cost = self.open_task, 0.0, 0.0

        def on_epoch(epoch: Epoch, checkpoint: Checkpoint) -> None:
            nonlocal reported, cost
            checkpoint.seconds = seconds()
            self.curves.epoch(epoch, checkpoint)
            if self.out is not None:
                checkpoints.keep(self.out, task, checkpoint)
            now = time.perf_counter()
            if on_progress is not None and now - reported > max(_TELL, SHARE * cost):
                numbers = epoch.number, epoch.epochs, epoch.loss, epoch.accuracy()
                on_progress(Progress(self.config.seed, seeds, task.index, *numbers))
                reported = time.perf_counter()
                cost = reported - now

        return on_epoch

    def saving(self) -> Callable[[], None]:
        return (lambda: None) if self.out is None else self.method.saving(self.out / NET)

    def test(self) -> list[float]:
        """The accuracy on every learned task."""
        return [
            fraction_correct(partial(self.method.predict, task=task), self._tests[task].test())
            for task in range(len(self.lines) + 1)
        ]

    def test_untold(self) -> dict[str, Any]:
        """The accuracy without telling which task it is, if that was asked for."""
        feeds, pools = self._tests[: len(self.lines) + 1], is_domain_incremental(self.stream.tasks)
        return {"untold": test_untold(self.method, feeds, pools)} if self.config.untold else {}

    def note(self, tested: tuple[list[float], dict[str, Any]], seconds: float) -> None:
        """Write the line of a task that was learned and saved."""
        accuracies, untold = tested
        self.matrix.add(accuracies)
        footprint = self.method.footprint()
        line = {
            "task": self.next_task.name,
            "classes": list(self.next_task.class_names),
            "accuracy": self.matrix.rows[-1],
            "average_accuracy": self.matrix.average_accuracy(),
            "forgetting": self.matrix.forgetting(),
            "parameters": footprint.parameters,
            "buffer": footprint.buffer,
            "seconds": seconds,
            **untold,
        }
        self.lines.append(line)
        self.curves.task(self.lines)
        if self.out is not None:
            write_lines(self.out, self.lines)
            (self.out / CHECKPOINT).unlink(missing_ok=True)


def versions() -> dict[str, str]:
    return {"rankup": rankup.__version__, "torch": torch.__version__}

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

_TELL = 0.5  # seconds between two progress reports, at least


@dataclass(frozen=True)
class Progress:
    """The progress of a run, and of those that learn together with it.

    Attributes:
        seed: the run's seed.
        seeds: how many runs learn together.
        task: the index of the open task.
        epoch: how many epochs of it are done.
        epochs: how many it takes.
        loss: the loss of the last epoch.
        accuracy: on a sample of the training data.
    """

    seed: int
    seeds: int
    task: int
    epoch: int
    epochs: int
    loss: float
    accuracy: float


OnProgress = Callable[[Progress], None]


@dataclass(eq=False)
class SeedRun:
    """One seed's run: its settings, its stream and its folder.

    The stream, the method and other large objects are made when they are first needed. They are
    not pickled when the run is sent to another process.

    Args:
        config: its settings.
        preloaded: its stream, if it is already made.
        out: its folder; None to write nothing.
        resume: whether it may continue the run in its folder.
        data: the folder of data sets from which its stream is made.
        until: after how many tasks to stop; None for all.
        log: the tool that draws its curves.
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
        """The tasks, on the run's device."""
        stream = self._make_stream() if self.preloaded is None else self.preloaded
        return stream.to(self.config.device)

    @cached_property
    def setting(self) -> Setting:
        """What the method is made from."""
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
        """The method, loaded from the folder if it was saved there."""
        kind = method_class(self.config.method)
        if self.out is not None and kind.is_in(self.out / NET):
            return kind.load(self.out / NET, self.setting)
        return kind(self.setting)

    @cached_property
    def curves(self) -> Curves:
        return Curves(self.log, self.config, self.out)

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`, one per task learned."""
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
        """How many tasks the folder lists as learned, by this process or another."""
        return len(read_lines(self.folder))

    @property
    def unfinished(self) -> bool:
        """Whether the folder lacks tasks. Unlike `finished`, it reads the folder each time."""
        return self.learned < (self.until or self.config.tasks)

    @property
    def finished(self) -> bool:
        return len(self.lines) >= (self.until or len(self.stream))

    @property
    def next_task(self) -> Task:
        return self.stream[len(self.lines)]

    @property
    def open_task(self) -> OpenTask:
        """The next task, as checkpoints identify it."""
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
        """Raise an error if the run can neither begin nor continue. Writes nothing."""
        method_class(self.config.method).check(self.setting)
        if self.out is not None:
            check_folder(self.config, self.out, self.resume)
            learned, listed = self.method.learned, len(self.lines)
            refuse_mixed_up(self.out, self.config.method, learned, listed)

    def open(self) -> None:
        """Check the run, then make its folder, so that a refused run leaves none behind."""
        self.check()
        if self.out is not None:
            write_config(self.config, self.out)

    def refuse_if_outdated(self) -> None:
        """Raise an error if the folder has changed since it was read. The caller must hold its
        lock."""
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
        """Remove the checkpoint of a finished run, which was killed before it could do so. The
        caller must hold the folder's lock."""
        if self.finished and self.has_checkpoint:
            (self.folder / CHECKPOINT).unlink(missing_ok=True)

    def warn_if_capped(self) -> None:
        """Warn of layers whose rank is lower than the rule says, as `grow` does."""
        net = getattr(self.method, "net", None)
        if isinstance(net, IncrementalNet):
            net.plan.warn(net.options)

    def checkpoint(self, note: Callable[[str], None]) -> Checkpoint | None:
        """The checkpoint of the next task, if there is one.

        Args:
            note: called with a message about a checkpoint that cannot be used.
        """
        return None if self.out is None else read_checkpoint(self.out, self.open_task, note)

    def watch(
        self,
        checkpoints: Checkpoints,
        seconds: Callable[[], float],
        on_progress: OnProgress | None,
        seeds: int,
    ) -> OnEpoch:
        """A callback that writes checkpoints and reports progress, seldom enough to cost little.

        Args:
            seconds: returns how long the task has taken so far.
            seeds: how many runs learn together.
        """
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
        """Capture the method's state and return a function that saves it."""
        return (lambda: None) if self.out is None else self.method.saving(self.out / NET)

    def test(self) -> list[float]:
        """The accuracy on every learned task."""
        return [
            fraction_correct(partial(self.method.predict, task=task), self._tests[task].test())
            for task in range(len(self.lines) + 1)
        ]

    def test_untold(self) -> dict[str, Any]:
        """The results without telling the task, under the key "untold"; empty if the run is not
        tested so."""
        feeds, pools = self._tests[: len(self.lines) + 1], is_domain_incremental(self.stream.tasks)
        return {"untold": test_untold(self.method, feeds, pools)} if self.config.untold else {}

    def note(self, tested: tuple[list[float], dict[str, Any]], seconds: float) -> None:
        """Write the line of a task that was learned and saved.

        Args:
            tested: what `test` and `test_untold` returned.
            seconds: how long the task has taken.
        """
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
    """The versions that a run's settings record."""
    return {"rankup": rankup.__version__, "torch": torch.__version__}

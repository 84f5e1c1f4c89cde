"""Progress bars on the terminal, or lines in a log."""

import sys
import time
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from rankup.runs.seed_run import Progress


STOPPED = 130  # exit status of an interrupted process, as in a shell
_OFTEN = 30.0  # seconds between two lines if there is no terminal for bars


@contextmanager
def bars(then: str = "run the same command with --resume to continue") -> "Iterator[Bars]":
    """Bars on the terminal that vanish when all is done. Ctrl-C exits with a sentence that says
    what then."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    class LoggedProgress(Progress):
        """Prints a line of progress now and then if there is no terminal for bars."""

        last = time.monotonic()

        def update(self, task_id: TaskID, *args: Any, **fields: Any) -> None:
            super().update(task_id, *args, **fields)
            if self.disable and time.monotonic() - self.last > _OFTEN:
                self.last = time.monotonic()
                line = self._tasks[task_id]
                note(self, f"{line.description}, {line.fields['state']}".strip(", "))

    columns = [
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
    ]
    # Methods and tasks differ in speed, so the remaining time is estimated over a long period.
    console = Console(stderr=True)
    if console.is_terminal:
        # Not the whole line: a terminal echoes ^C there, and a bar that then wraps is not erased.
        console.width = max(1, console.width - len("^C"))
    shown = LoggedProgress(
        *columns,
        console=console,
        transient=True,
        speed_estimate_period=3600,
        disable=not console.is_terminal,
    )
    try:
        with shown:
            yield shown
    except KeyboardInterrupt:
        print(f"rankup: stopped; {then}", file=sys.stderr)
        sys.exit(STOPPED)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A sign on the terminal that something is going on whose length nobody knows."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


def note(bars: "Bars", text: str) -> None:
    """Say something above the bars."""
    from rankup.report.tables import print_line

    print_line(bars.console, f"rankup: {text}")


class SeedBars:
    """A bar for each seed that is being learned."""

    def __init__(self, bars: "Bars", tasks: int, seeds: int, method: str = "") -> None:
        self.bars, self.tasks, self.seeds = bars, tasks, seeds
        # In a terminal the bar above these names the method.
        self._method = f"{method}, " if method and bars.disable else ""
        self._lines: dict[int, TaskID] = {}
        if seeds == 1:
            self._lines[0] = bars.add_task("learning", total=tasks, state="")

    def show(self, now: "Progress") -> None:
        seed = now.seed if self.seeds > 1 else 0
        if seed not in self._lines:
            self._lines[seed] = self.bars.add_task("", total=self.tasks, state="")
        which = f"{now.seeds} seeds, " if now.seeds > 1 else f"seed {seed}, "
        which = self._method + (which if self.seeds > 1 else "")
        self.bars.update(
            self._lines[seed],
            description=f"{which}task {now.task + 1}/{self.tasks}, epoch {now.epoch}/{now.epochs}",
            completed=now.task + now.epoch / now.epochs,
            state=f"loss {now.loss:.3f}, {now.accuracy:.1%} right",
        )

    def close(self) -> None:
        for line in self._lines.values():
            self.bars.remove_task(line)


class ExperimentBars:
    """A bar for all experiments to run, and one for each that is running."""

    def __init__(self, bars: "Bars", experiments: int) -> None:
        self.bars, self.experiments = bars, experiments
        self._line = bars.add_task("", total=experiments, state="")
        self._lines: dict[Hashable, TaskID] = {}
        self._done = 0
        self._count()

    def show(self, experiment: Hashable, tasks: int, now: "Progress") -> None:
        if experiment not in self._lines:
            self._lines[experiment] = self.bars.add_task(str(experiment), total=tasks, state="")
        self.bars.update(
            self._lines[experiment],
            completed=now.task + now.epoch / now.epochs,
            state=f"task {now.task + 1}/{tasks}, {now.accuracy:.1%} right",
        )

    def end(self, experiment: Hashable) -> None:
        if experiment in self._lines:
            self.bars.remove_task(self._lines.pop(experiment))
        self._done += 1
        self._count()

    def _count(self) -> None:
        which = f"{self._done} of {self.experiments} done"
        self.bars.update(self._line, description=which, completed=self._done)


class MethodBars:
    """A bar for all methods, above those for the seeds of the one that is learning."""

    def __init__(self, bars: "Bars", tasks: int, methods: int) -> None:
        self.bars, self.tasks, self.methods = bars, tasks, methods
        self._line = bars.add_task("", total=methods, state="")
        self._done = 0
        self._seeds: SeedBars | None = None

    def begin(self, method: str, learned: Mapping[int, int]) -> None:
        """Show that a method begins; `learned` has the tasks each seed has learned already."""
        self._start, self._at = learned, {seed: float(tasks) for seed, tasks in learned.items()}
        self._seeds = SeedBars(self.bars, self.tasks, len(learned), method)
        which = f"method {self._done + 1}/{self.methods}: {method}"
        self.bars.update(self._line, description=which, completed=self._done)

    def show(self, now: "Progress") -> None:
        assert self._seeds is not None
        self._seeds.show(now)
        at = now.task + now.epoch / now.epochs
        # One of the seeds that learn together reports for all.
        for seed in self._at if now.seeds > 1 else [now.seed]:
            self._at[seed] = max(at, self._at[seed])
        left = sum(self.tasks - tasks for tasks in self._start.values())
        share = (sum(self._at.values()) - sum(self._start.values())) / left
        self.bars.update(self._line, completed=self._done + share)

    def end(self) -> None:
        if self._seeds is not None:
            self._seeds.close()
        self._seeds = None
        self._done += 1
        self.bars.update(self._line, completed=self._done)

"""Running what a table lacks, one cell after another or several at once, so that it can be stopped
and resumed at any time, on one machine or on several."""

from __future__ import annotations

import datetime
import platform
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rankup.errors import RankupError
from rankup.paper.experiment import TASKS, Cell
from rankup.paper.results import Result, Results
from rankup.paper.timings import piece
from rankup.runs import process_pool
from rankup.runs.compare import failure_in_one_line, release
from rankup.runs.launch import Launch, chosen_device, share_cores, share_queues
from rankup.runs.many_seeds import run_seeds
from rankup.runs.read import read_run
from rankup.runs.request import Device
from rankup.runs.run import OnProgress, Progress

_LARGE = ("s-miniimagenet",)  # images of 21,168 numbers
# How many times as long as others these take, measured on an H200.
_SLOW = {"nscl": 5, "agem": 3, "er-ring": 2, "ewc": 2, "hat": 2, "icarl": 2, "supsup": 2}
WORK = ".work"  # unfinished runs, in the folder of results


class Said(NamedTuple):
    """What a cell reports while it runs."""

    cell: Cell
    what: Progress | str


class Ended(NamedTuple):
    cell: Cell
    failed: str  # why, if it did
    seconds: float


@dataclass(frozen=True)
class Runner:
    """Runs cells, each once, into a folder of results.

    Args:
        command: what was asked for, as results note it.
    """

    results: Results
    device: Device
    data: Path | None
    command: str
    download: bool = False
    teachers: frozenset[Cell] = frozenset()  # whose networks others have yet to learn from

    def left(self, cells: Sequence[Cell]) -> list[Cell]:
        return [cell for cell in cells if self.results.missing(cell)]

    def run_all(
        self,
        cells: Sequence[Cell],
        hear: Callable[[Said], None],
        *,
        jobs: int = 1,
        minutes: float | None = None,
    ) -> Generator[Ended, None, None]:
        """Run cells, `jobs` of them at once; after `minutes` begin no more."""
        until = None if minutes is None else time.time() + 60 * minutes
        if not cells or minutes == 0:
            return
        teachers = frozenset(cell.teacher for cell in cells if cell.teacher)
        runner = replace(self, teachers=teachers)
        with piece(self.results.root, machine(self.device), self.command) as watch:

            def heard(said: Said) -> None:
                watch.goes_on()
                hear(said)

            with closing(runner._run_each(cells, heard, jobs, until)) as each:
                for ended in each:
                    if not self.results.missing(ended.cell):
                        watch.ended(ended.cell)
                    yield ended

    def _run_each(
        self, cells: Sequence[Cell], hear: Callable[[Said], None], jobs: int, until: float | None
    ) -> Generator[Ended, None, None]:
        if jobs == 1:
            for cell in sorted(cells, key=_is_taught):
                if until is None or time.time() < until:
                    yield self._run_timed(cell, hear)
            return
        lost = "a process that ran seeds was killed, perhaps for lack of memory; fewer --jobs need "
        for many, some in phases(cells, jobs):
            if until is not None and time.time() >= until:
                return
            at_once, small = min(many, len(some)), all(map(_is_small, some))
            order = [_Job(self, cell, until, at_once, small) for cell in some]
            ended = process_pool.in_processes(_run_job, order, many, hear=hear, lost=f"{lost}less")
            with closing(ended):
                yield from (outcome for _, outcome in ended if outcome is not None)

    def _run_timed(self, cell: Cell, hear: Callable[[Said], None]) -> Ended:
        begun = time.perf_counter()
        failed = self.run(cell, lambda now: hear(Said(cell, now)), lambda t: hear(Said(cell, t)))
        return Ended(cell, failed, time.perf_counter() - begun)

    def run(self, cell: Cell, on_progress: OnProgress | None, note: Callable[[str], None]) -> str:
        """Run a cell's missing seeds; return why some failed, if they did.

        If a run itself fails, that is its result. If it was refused or ran out of memory, it has
        none: another machine may have what it lacked.
        """
        missing, options, teacher = self.results.missing(cell), cell.options(), cell.teacher
        if not missing:  # another process or machine has run them meanwhile
            return ""
        try:
            if teacher is not None:
                failed = self._run_seeds(teacher, missing, teacher.options(), on_progress, note)
                if failed:
                    return f"its teacher failed: {failed}"
                options["teacher"] = str(self._work(teacher))
            failed = self._run_seeds(cell, missing, options, on_progress, note)
        except Exception as error:
            return failure_in_one_line(error, self._work(cell))
        finally:
            release(str(cell), chosen_device(self.device), "the same command")
        done = {cell} - self.teachers if teacher is None else {cell, teacher}
        for each in done:
            shutil.rmtree(self._work(each), ignore_errors=True)
        return failed

    def _run_seeds(
        self,
        cell: Cell,
        seeds: Sequence[int],
        options: dict[str, Any],
        on_progress: OnProgress | None,
        note: Callable[[str], None],
    ) -> str:
        """Make sure that these seeds have networks in the work folder, and results; return why
        some failed, if they did."""
        folders = {seed: self._work(cell) / f"seed-{seed}" for seed in seeds}
        started = time.perf_counter()
        launch = Launch(cell.request(self.device, self.data, self.download))
        runs = launch.of(cell.method, options, folders)
        failures = run_seeds(runs, on_progress=on_progress, note=note)
        seconds = (time.perf_counter() - started) / len(seeds)
        new = [seed for seed in self.results.missing(cell) if seed in folders]
        if new:
            done = [self._result(cell, seed, failures.get(seed, ""), seconds) for seed in new]
            try:
                self.results.add(cell, done)
            except OSError as error:
                raise RankupError(
                    f"results cannot be written to {self.results.path(cell)}: "
                    f"{error.strerror or error}; what was learned is kept; run the same "
                    "command to continue"
                ) from error
        return next(iter(failures.values()), "")

    def _work(self, cell: Cell) -> Path:
        return self.results.root / WORK / cell.folder()

    def _result(self, cell: Cell, seed: int, failed: str, seconds: float) -> Result:
        folder = self._work(cell) / f"seed-{seed}"
        run = None if failed else read_run(folder, selectors=False)
        config = dict(run.config) if run else {}
        if run and cell.teacher is not None:  # its path on this machine is of no use elsewhere
            config["options"] = {**config["options"], "teacher": str(cell.teacher.folder())}
        return Result(
            seed=seed,
            config=config,
            accuracy=run.matrix.rows if run else [],
            parameters=run.parameters if run else 0.0,
            buffer=run.buffer if run else 0.0,
            # For a resumed run, including the time before it was stopped.
            seconds=max(seconds, run.seconds) if run else seconds,
            date=datetime.date.today().isoformat(),
            machine=machine(self.device),
            command=self.command,
            failed=failed,
        )


class _Job(NamedTuple):
    runner: Runner
    cell: Cell
    until: float | None  # time after which no more are begun
    at_once: int  # how many jobs share a GPU
    small: bool  # none of them can fill it


def _run_job(job: _Job) -> Ended | None:
    share_queues(job.at_once)
    if job.small:
        share_cores(job.at_once)
    if job.until is not None and time.time() >= job.until:
        return None
    return job.runner._run_timed(job.cell, process_pool.tell)


def phases(cells: Sequence[Cell], jobs: int) -> list[tuple[int, list[Cell]]]:
    """How many of which cells to run at once: of small networks as many as asked for; a quarter of
    that of networks that fill a GPU, with many convolutions or large products. These do not run
    beside others, whose many short steps would each wait for a long one. Teachers come first, few
    at once, as some of them are large. Within a phase long cells come first, so that none is left
    to run alone when all others are done.

    >>> from rankup.paper.experiment import cell
    >>> cells = [cell("p-mnist", epochs=epochs) for epochs in (5, 9)]
    >>> cells.append(cell("s-miniimagenet", epochs=5))
    >>> [(jobs, [each.epochs for each in some]) for jobs, some in phases(cells, jobs=8)]
    [(2, [5]), (8, [9, 5])]
    """
    few = max(1, jobs // 4)
    teaching = {cell.teacher for cell in cells}
    teachers = [cell for cell in cells if cell in teaching]
    others = [cell for cell in cells if cell not in teaching]
    convolutions = [cell for cell in others if cell.net != "mlp"]
    small = [cell for cell in others if _is_small(cell)]
    large = [cell for cell in others if cell not in (*convolutions, *small)]
    found = ((few, teachers), (few, convolutions), (few, large), (jobs, small))
    return [(many, sorted(some, key=_length, reverse=True)) for many, some in found if some]


def _is_taught(cell: Cell) -> bool:
    return cell.teacher is not None


def _is_small(cell: Cell) -> bool:
    return cell.net == "mlp" and cell.stream not in _LARGE


def _length(cell: Cell) -> int:
    """Roughly how long it takes, relative to others."""
    return cell.epochs * cell.seeds * (cell.tasks or TASKS) * _SLOW.get(cell.method, 1)


def machine(device: Device) -> str:
    if device is not Device.cpu and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"{platform.machine()}, {threads} thread{'s' if threads > 1 else ''}"


def share(cells: Sequence[Cell], part: str) -> list[Cell]:
    """Every n-th cell, for one of several processes or machines.

    >>> from rankup.paper.experiment import cell
    >>> len(share([cell("p-mnist"), cell("r-mnist"), cell("s-cifar100")], "1/2"))
    2
    """
    try:
        number, parts = map(int, part.split("/"))
        if not 1 <= number <= parts:
            raise ValueError
    except ValueError:
        raise RankupError(f"a share is written like 1/4, the first of four; got {part!r}") from None
    return list(cells[number - 1 :: parts])

"""Runs the experiments that a table lacks, one after another or several at once. A run can be
stopped and resumed at any time, on one machine or on several."""

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
from rankup.paper.experiment import Experiment
from rankup.paper.results import Result, Results
from rankup.paper.timings import timed
from rankup.runs import process_pool
from rankup.runs.answer_time import answer_milliseconds
from rankup.runs.compare import failure_in_one_line, release
from rankup.runs.launch import Launch, chosen_device, share_cores, share_queues
from rankup.runs.many_seeds import run_seeds
from rankup.runs.ray_pool import RayPool
from rankup.runs.read import Run, read_run
from rankup.runs.request import Device
from rankup.runs.seed_run import OnProgress, Progress, SeedRun

_LARGE = ("s-miniimagenet",)  # images of 21,168 numbers
# How many times as long as others these take, measured on an H200; of der, gpm and wsn, which were
# not measured there, as long as their nearest relatives.
_SLOW = {"nscl": 5, "gpm": 5, "agem": 3, "der": 3} | dict.fromkeys(
    ("er-ring", "ewc", "hat", "icarl", "supsup", "wsn"), 2
)
WORK = ".work"  # unfinished runs, in the folder of results


class Message(NamedTuple):
    """A report of an experiment that runs."""

    experiment: Experiment
    content: Progress | str


class Finished(NamedTuple):
    experiment: Experiment
    failed: str  # why, if it did
    seconds: float


@dataclass(frozen=True)
class Runner:
    """Runs experiments, each once, into a folder of results.

    Args:
        command: what was asked for, as results note it.
    """

    results: Results
    device: Device
    data: Path | None
    command: str
    download: bool = False
    teachers: frozenset[Experiment] = frozenset()  # whose networks others have yet to learn from

    def left(self, experiments: Sequence[Experiment]) -> list[Experiment]:
        return [experiment for experiment in experiments if self.results.missing(experiment)]

    def run_all(
        self,
        experiments: Sequence[Experiment],
        on_message: Callable[[Message], None],
        *,
        jobs: int = 1,
        minutes: float | None = None,
        pool: RayPool | None = None,
    ) -> Generator[Finished, None, None]:
        """Run experiments, `jobs` of them at once; after `minutes` begin no more.

        Args:
            pool: a Ray cluster to run them on: `jobs` of them on each of its GPUs, or a seed on
                each of its CPUs.
        """
        from rankup.paper.on_ray import run_on  # which runs this class on a cluster

        until = None if minutes is None else time.time() + 60 * minutes
        if not experiments or minutes == 0:
            return
        teachers = frozenset(experiment.teacher for experiment in experiments if experiment.teacher)
        runner = replace(self, teachers=teachers)
        with timed(self.results.root, machine(self.device), self.command) as watch:

            def on_timed_message(message: Message) -> None:
                watch.tick()
                on_message(message)

            each = (
                runner._run_each(experiments, on_timed_message, jobs, until)
                if pool is None
                else run_on(pool, runner, experiments, on_timed_message, jobs, until)
            )
            with closing(each) as runs:
                for finished in runs:
                    if not self.results.missing(finished.experiment):
                        watch.finished(finished.experiment)
                    yield finished

    def _run_each(
        self,
        experiments: Sequence[Experiment],
        on_message: Callable[[Message], None],
        jobs: int,
        until: float | None,
    ) -> Generator[Finished, None, None]:
        if jobs == 1:
            for experiment in sorted(experiments, key=_is_taught):
                if until is None or time.time() < until:
                    yield self._run_timed(experiment, on_message)
            return
        lost = "a process that ran seeds was killed, perhaps for lack of memory; fewer --jobs need "
        for many, some in phases(experiments, jobs):
            if until is not None and time.time() >= until:
                return
            at_once, small = min(many, len(some)), all(map(is_small, some))
            order = [_Job(self, experiment, until, at_once, small) for experiment in some]
            outcomes = process_pool.in_processes(
                _run_job, order, many, hear=on_message, lost=f"{lost}less"
            )
            with closing(outcomes):
                yield from (outcome for _, outcome in outcomes if outcome is not None)

    def _run_timed(self, experiment: Experiment, on_message: Callable[[Message], None]) -> Finished:
        def send(content: Progress | str) -> None:
            on_message(Message(experiment, content))

        begun = time.perf_counter()
        failed = self.run(experiment, send, send)
        return Finished(experiment, failed, time.perf_counter() - begun)

    def run(
        self, experiment: Experiment, on_progress: OnProgress | None, note: Callable[[str], None]
    ) -> str:
        """Run an experiment's missing seeds; return why some failed, if they did.

        If a run itself fails, that is its result. If it was refused or ran out of memory, it has
        none: another machine may have what it lacked.
        """
        missing = self.results.missing(experiment)
        if not missing:  # another process or machine has run them meanwhile
            return ""
        failed, is_complete = self.learn(experiment, missing, on_progress, note)
        teacher = experiment.teacher
        done = {experiment} - self.teachers if teacher is None else {experiment, teacher}
        for each in done if is_complete else ():
            shutil.rmtree(self.work(each), ignore_errors=True)
        return failed

    def learn(
        self,
        experiment: Experiment,
        missing: Sequence[int],
        on_progress: OnProgress | None,
        note: Callable[[str], None],
    ) -> tuple[str, bool]:
        """Run seeds of an experiment; return why some failed, if they did, and whether all have a
        result: that they failed may be theirs."""
        options, teacher = experiment.options(), experiment.teacher
        try:
            if teacher is not None:
                failed = self._run_seeds(teacher, missing, teacher.options(), on_progress, note)
                if failed:
                    return f"its teacher failed: {failed}", False
                options["teacher"] = str(self.work(teacher))
            failed = self._run_seeds(experiment, missing, options, on_progress, note)
        except Exception as error:
            return failure_in_one_line(error, self.work(experiment)), False
        finally:
            release(str(experiment), chosen_device(self.device), "the same command")
        return failed, True

    def _run_seeds(
        self,
        experiment: Experiment,
        seeds: Sequence[int],
        options: dict[str, Any],
        on_progress: OnProgress | None,
        note: Callable[[str], None],
    ) -> str:
        """Make sure that these seeds have networks in the work folder, and results; return why
        some failed, if they did."""
        folders = {seed: self.work(experiment) / f"seed-{seed}" for seed in seeds}
        started = time.perf_counter()
        request = experiment.request(self.device, self.data, self.download)
        only = replace(request, seed=min(seeds), seeds=max(seeds) - min(seeds) + 1)
        launch = Launch(only, at_once=request.seeds)
        runs = launch.of(experiment.method, options, folders)
        failed = run_seeds(runs, on_progress=on_progress, note=note)
        failures = {run.config.seed: why for run, why in failed.items()}
        seconds = (time.perf_counter() - started) / len(seeds)
        new = [seed for seed in self.results.missing(experiment) if seed in folders]
        if new:
            done = [self._result(experiment, seed, failures.get(seed, ""), seconds) for seed in new]
            if experiment.timed:
                done = _with_answer_time(done, runs)
            try:
                self.results.add(experiment, done)
            except OSError as error:
                raise RankupError(
                    f"results cannot be written to {self.results.path(experiment)}: "
                    f"{error.strerror or error}; what was learned is kept; run the same "
                    "command to continue"
                ) from error
        return next(iter(failures.values()), "")

    def work(self, experiment: Experiment) -> Path:
        return self.results.root / WORK / experiment.folder()

    def _result(self, experiment: Experiment, seed: int, failed: str, seconds: float) -> Result:
        folder = self.work(experiment) / f"seed-{seed}"
        run = None if failed else read_run(folder, selectors=False)
        config = dict(run.config) if run else {}
        if run and experiment.teacher:  # its path on this machine is of no use elsewhere
            config["options"] = {**config["options"], "teacher": str(experiment.teacher.folder())}
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
            untold_rows=_untold_rows(run),
        )


def _with_answer_time(results: list[Result], runs: Sequence[SeedRun]) -> list[Result]:
    """Results with how long an answer takes, measured once: it does not depend on the seed."""
    by_seed = {run.config.seed: run for run in runs}
    whole = next((result for result in results if not result.failed), None)
    if whole is None:
        return results
    took = answer_milliseconds(by_seed[whole.seed])
    return [result if result.failed else replace(result, answer=took) for result in results]


def _untold_rows(run: Run | None) -> dict[str, list[list[float]]] | None:
    if run is None or run.untold is None or run.guessed is None:
        return None
    return {"accuracy": run.untold.rows, "tasks": run.guessed.rows}


class _Job(NamedTuple):
    runner: Runner
    experiment: Experiment
    until: float | None  # time after which no more are begun
    at_once: int  # how many jobs share a GPU
    small: bool  # none of them can fill it


def _run_job(job: _Job) -> Finished | None:
    share_queues(job.at_once)
    if job.small:
        share_cores(job.at_once)
    if job.until is not None and time.time() >= job.until:
        return None
    return job.runner._run_timed(job.experiment, process_pool.tell)


def phases(experiments: Sequence[Experiment], jobs: int) -> list[tuple[int, list[Experiment]]]:
    """How many of which experiments to run at once: `jobs` small networks, a quarter of that of
    networks that fill a GPU, with many convolutions or large products. These do not run beside
    others, whose many short steps would each wait for a long one. Teachers come first, few at once,
    as some of them are large. Within a phase long experiments come first, so that none is left to
    run alone when all others are done.

    >>> experiments = [Experiment.of("p-mnist", epochs=epochs) for epochs in (5, 9)]
    >>> experiments.append(Experiment.of("s-miniimagenet", epochs=5))
    >>> [(jobs, [each.epochs for each in some]) for jobs, some in phases(experiments, jobs=8)]
    [(2, [5]), (8, [9, 5])]
    """
    few = _few(jobs)
    teaching = {experiment.teacher for experiment in experiments}
    teachers = [experiment for experiment in experiments if experiment in teaching]
    others = [experiment for experiment in experiments if experiment not in teaching]
    convolutions = [experiment for experiment in others if experiment.net != "mlp"]
    small = [experiment for experiment in others if is_small(experiment)]
    large = [experiment for experiment in others if experiment not in (*convolutions, *small)]
    groups = ((few, teachers), (few, convolutions), (few, large), (jobs, small))
    return [(many, sorted(some, key=_length, reverse=True)) for many, some in groups if some]


def at_once(experiment: Experiment, jobs: int) -> int:
    """How many like this run at the same time."""
    return jobs if is_small(experiment) else _few(jobs)


def _few(jobs: int) -> int:
    return max(1, jobs // 4)


def _is_taught(experiment: Experiment) -> bool:
    return experiment.teacher is not None


def is_small(experiment: Experiment) -> bool:
    return experiment.net == "mlp" and experiment.stream not in _LARGE


def _length(experiment: Experiment) -> int:
    """Roughly how long it takes, relative to others."""
    steps = experiment.epochs * experiment.seeds * experiment.learned
    return steps * _SLOW.get(experiment.method, 1)


def machine(device: Device) -> str:
    if device is not Device.cpu and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"{platform.machine()}, {threads} thread{'s' if threads > 1 else ''}"


def share(experiments: Sequence[Experiment], part: str) -> list[Experiment]:
    """Every n-th experiment, for one of several processes or machines.

    >>> experiments = [Experiment.of(stream) for stream in ("p-mnist", "r-mnist", "s-cifar100")]
    >>> len(share(experiments, "1/2"))
    2
    """
    try:
        number, parts = map(int, part.split("/"))
        if not 1 <= number <= parts:
            raise ValueError
    except ValueError:
        raise RankupError(f"a share is written like 1/4, the first of four; got {part!r}") from None
    return list(experiments[number - 1 :: parts])

"""Experiments of the paper on a Ray cluster: several on each GPU, or a seed on each CPU.

Only the driver writes results, so that it makes no difference whether nodes see its folders.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from rankup.paper.experiment import Experiment
from rankup.paper.results import Result, Results
from rankup.paper.runner import Finished, Message, Runner, is_small, phases
from rankup.runs import process_pool
from rankup.runs.launch import chosen_device, share_cores, share_queues
from rankup.runs.ray_pool import Needs, RayPool
from rankup.runs.seed_run import Progress

New = dict[Experiment, list[Result]]


def run_on(
    pool: RayPool,
    runner: Runner,
    experiments: Sequence[Experiment],
    on_message: Callable[[Message], None],
    jobs: int,
    until: float | None,
) -> Generator[Finished, None, None]:
    """Run experiments, `jobs` of them on each GPU; after `until` begin no more."""
    on_gpu = chosen_device(runner.device, elsewhere=True) == "cuda"
    for many, some in phases(experiments, jobs):
        small = all(map(is_small, some))
        order = [
            _Job(runner, experiment, until, many, small, seeds)
            for experiment in some
            for missing in [runner.results.missing(experiment)]
            for seeds in ([missing] if on_gpu else [[seed] for seed in missing])
        ]
        ended: dict[Experiment, list[Finished | None]] = {job.experiment: [] for job in order}
        total = Counter(job.experiment for job in order)
        outcomes = pool.run(
            _run_job,
            order,
            needs=Needs(cpus=1, gpus=1 / many if on_gpu else 0),
            hear=on_message,
            lost="an experiment was lost several times with the process or node it ran on",
        )
        with closing(outcomes):
            for job, (finished, new) in outcomes:
                _keep(runner, new)
                all_of = ended[job.experiment]
                all_of.append(finished)
                if len(all_of) == total[job.experiment] and None not in all_of:
                    yield _together([each for each in all_of if each])
    for teacher in {experiment.teacher for experiment in experiments if experiment.teacher}:
        shutil.rmtree(runner.work(teacher), ignore_errors=True)


def _keep(runner: Runner, new: New) -> None:
    """Add results that came from a node, and drop the runs that they are of, unless others have
    yet to learn from them."""
    for experiment, results in new.items():
        missing = runner.results.missing(experiment)
        runner.results.add(experiment, [one for one in results if one.seed in missing])
        for result in results if experiment not in runner.teachers else ():
            shutil.rmtree(runner.work(experiment) / f"seed-{result.seed}", ignore_errors=True)


def _together(ended: Sequence[Finished]) -> Finished:
    """What became of an experiment whose seeds were run one by one."""
    why = next((each.failed for each in ended if each.failed), "")
    return Finished(ended[0].experiment, why, sum(each.seconds for each in ended))


@dataclass(frozen=True)
class _Job:
    """Seeds of an experiment, as one piece of work."""

    runner: Runner
    experiment: Experiment
    until: float | None  # time after which it is not begun
    at_once: int  # how many share a GPU
    small: bool  # none of them can fill it
    seeds: list[int]

    @property
    def folders(self) -> list[Path]:
        both = [self.experiment, self.experiment.teacher]
        return [
            self.runner.work(each) / f"seed-{seed}"
            for each in both
            if each is not None
            for seed in self.seeds
        ]

    def moved(self, to: Mapping[Path, Path]) -> _Job:
        """In a folder of the same form, which is made of links to the copies."""
        root = next(iter(to.values())).parent / "results"
        for folder, copy in to.items():
            copy.mkdir(exist_ok=True)
            link = root / folder.relative_to(self.runner.results.root)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(copy, target_is_directory=True)
        return replace(self, runner=replace(self.runner, results=Results(root)))


@dataclass(frozen=True)
class _Collected(Results):
    """Results that are not written, but sent to whoever asked for them."""

    new: New = field(default_factory=dict)

    def add(self, experiment: Experiment, results: Sequence[Result]) -> None:
        self.new.setdefault(experiment, []).extend(results)


def _run_job(job: _Job) -> tuple[Finished | None, New]:
    share_queues(job.at_once)
    if job.small:
        share_cores(job.at_once)
    if job.until is not None and time.time() >= job.until:
        return None, {}
    collected = _Collected(job.runner.results.root)
    runner = replace(job.runner, results=collected)

    def send(content: Progress | str) -> None:
        process_pool.tell(Message(job.experiment, content))

    begun = time.perf_counter()
    failed, _ = runner.learn(job.experiment, job.seeds, send, send)
    return Finished(job.experiment, failed, time.perf_counter() - begun), collected.new

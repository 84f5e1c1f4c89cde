"""Learning a stream with a method, in a run folder from which it can be resumed at any time.

config.json    the settings, enough to repeat the run
metrics.jsonl  a line per task learned
net/           the state of the method
checkpoint.safetensors   the task being learned, after its last finished epoch
"""

import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from rankup.data.streams import Stream
from rankup.runs.checkpoints import (
    Checkpoints,
)
from rankup.runs.curves import closed_in_the_end
from rankup.runs.folder import (
    RunConfig,
    working_in,
)
from rankup.runs.seed_run import OnProgress, SeedRun
from rankup.training.checkpoint import CheckpointError
from rankup.training.engine.select import Engine
from rankup.training.loop import TaskFailed, learn


def run(
    config: RunConfig,
    stream: Stream,
    out: Path | None,
    *,
    resume: bool = False,
    on_progress: OnProgress | None = None,
) -> None:
    """Learn all tasks of a stream that are not learned yet."""
    learn_run(SeedRun(config, stream, out, resume), on_progress)


def learn_run(seed_run: SeedRun, on_progress: OnProgress | None = None) -> None:
    """Let a run learn all tasks that it has not learned yet, or raise why it failed."""
    for failure in run_together([seed_run], on_progress=on_progress).values():
        raise failure


def run_together(
    runs: Sequence[SeedRun],
    *,
    on_progress: OnProgress | None = None,
    note: Callable[[str], None] = warnings.warn,
) -> dict[SeedRun, TaskFailed]:
    """Let several runs learn their streams at once, in one process. If some fail, the others go on.

    Args:
        note: called with messages for the user.

    Returns:
        The errors of the runs that failed.
    """
    torch.set_num_threads(runs[0].config.threads)
    torch.backends.cudnn.deterministic = True  # the same seed, the same numbers
    for seed_run in runs:
        seed_run.open()
    alike = len({r.config.but_for_its_seed() for r in runs}) == 1
    engine, failures = Engine(note, alike=alike), dict[SeedRun, TaskFailed]()
    checkpoints = Checkpoints(note)
    used = [r.out for r in runs if r.out and (not r.finished or r.has_checkpoint)]
    with working_in(used), closed_in_the_end(r.curves for r in runs):
        for seed_run in runs:
            seed_run.refuse_if_outdated()
            seed_run.drop_old_checkpoint()
        while going := [r for r in runs if not r.finished and r not in failures]:
            # Runs that were stopped at different tasks catch up first.
            next_task = min(len(r.lines) for r in going)
            failures |= _learn_next(
                [r for r in going if len(r.lines) == next_task], engine, checkpoints, on_progress
            )
    return failures


def _learn_next(
    runs: Sequence[SeedRun],
    engine: Engine,
    checkpoints: Checkpoints,
    on_progress: OnProgress | None,
) -> dict[SeedRun, TaskFailed]:
    """Let runs learn their next task, which has the same index for all, and record it."""
    started, before = time.perf_counter(), 0.0

    def seconds() -> float:
        """Seconds that the task has taken in total; runs that learn together share them."""
        return before + (time.perf_counter() - started) / len(runs)

    # Other runs saved the task before they were stopped, or learn all tasks at once.
    learning = [r for r in runs if r.method.learned == len(r.lines)]
    failures: list[TaskFailed | None] = []
    if learning:
        methods, tasks = [r.method for r in learning], [r.next_task for r in learning]
        watches = [
            # Only one reports progress, for all, because that takes time.
            r.watch(checkpoints, seconds, on_progress if r is learning[0] else None, len(learning))
            for r in learning
        ]
        points = [r.checkpoint(engine.note) for r in learning]
        before = max(0.0 if point is None else point.seconds for point in points)
        try:
            failures = learn(methods, tasks, engine, points, watches)
        except CheckpointError as error:
            engine.note(f"task {tasks[0].name!r} starts over: {error}")
            before = 0.0
            failures = learn(methods, tasks, engine, None, watches)
    failed = {r: why for r, why in zip(learning, failures, strict=True) if why is not None}
    # If a run was stopped just after a task was saved, the time spent learning it is lost.
    _record([r for r in runs if r not in failed], seconds())
    return failed


def _record(runs: Sequence[SeedRun], seconds: float) -> None:
    """For every run, save what was learned, test all tasks and write a line."""
    if not runs:
        return
    # Runs are saved in threads, because disks are slow. Tests would not be faster in threads:
    # Python runs one at a time, and switching takes longer than waiting for a GPU.
    with ThreadPoolExecutor(len(runs)) as pool:
        # The state is captured first, because tests may replace a network's tensors.
        saved = [pool.submit(save) for save in [r.saving() for r in runs]]
        tested = [(r.test(), r.test_untold()) for r in runs]
        for write in saved:
            write.result()
        list(pool.map(lambda r, row: r.note(row, seconds), runs, tested))

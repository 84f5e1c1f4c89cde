"""Running several seeds: together in one graph on a GPU, or in a process for each core on the CPU.
On a Ray cluster each run is a task, or each group that a GPU runs in one graph.

Processes have one thread, so that the files of a seed are the same, byte for byte, as those of the
seed alone with one thread.
"""

import threading
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from rankup.data.streams import Stream
from rankup.runs import process_pool
from rankup.runs.folder import other_torch
from rankup.runs.process_pool import ProcessPool
from rankup.runs.ray_pool import Needs, RayPool, fetch
from rankup.runs.records import CONFIG, unsealed_note
from rankup.runs.run import learn_run, run_together
from rankup.runs.seed_run import OnProgress, Progress, SeedRun
from rankup.training.loop import TaskFailed
from rankup.utils.malloc import keep_freed_memory


def run_seeds(
    runs: Sequence[SeedRun],
    *,
    on_progress: OnProgress | None = None,
    note: Callable[[str], None],
    pool: RayPool | ProcessPool | None = None,
) -> dict[SeedRun, str]:
    """Run all runs, which may differ in more than the seed, and return why any of them failed.

    Args:
        on_progress: called with the progress of runs.
        note: called with messages for the user.
        pool: a Ray cluster to use in place of this machine, or processes of this machine that are
            kept for later runs.
    """
    if other := _other_torch(runs):
        note(other)
    if old := unsealed_note(run.folder for run in runs):
        note(old)
    if isinstance(pool, RayPool):
        return _on_ray(runs, pool, on_progress, note)
    if len(runs) > 1 and runs[0].config.device != "cuda":
        return _in_processes(runs, on_progress, pool)
    return _run_here(runs, on_progress, note)


def _run_here(
    runs: Sequence[SeedRun], on_progress: OnProgress | None, note: Callable[[str], None]
) -> dict[SeedRun, str]:
    if runs[0].config.device == "cuda":
        _share_streams(runs)
        on_progress = _loading_plots(on_progress)
    else:
        keep_freed_memory()
    failures = run_together(runs, on_progress=on_progress, note=note)
    return {run: str(why) for run, why in failures.items()}


def _other_torch(runs: Sequence[SeedRun]) -> str:
    """A message about runs that continue with another version of torch; empty if there are none."""
    changed = [
        (run, before)
        for run in runs
        if run.unfinished and (before := other_torch(run.config, run.folder))
    ]
    if not changed:
        return ""
    first, versions = changed[0]
    others = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
    return (
        f"{first.folder}{others} was started with torch {', then '.join(versions)} and continues "
        f"with {first.config.versions['torch']}: its bits may not be those of one version alone"
    )


def _share_streams(runs: Sequence[SeedRun]) -> None:
    """Move streams to the GPU, those that several runs share, such as trials of one seed, once."""
    moved: dict[Stream, Stream] = {}
    for run in runs:
        if (stream := run.preloaded) is not None:
            if stream not in moved:
                moved[stream] = stream.to(run.config.device)
            run.preloaded = moved[stream]


def _loading_plots(on_progress: OnProgress | None) -> OnProgress:
    """Wrap a callback so that its first call also starts to import Matplotlib, for which Python has
    time while it waits for a GPU."""
    load = threading.Thread(target=import_module, args=("matplotlib.figure",), daemon=True)

    def tell(progress: Progress) -> None:
        if load.ident is None:
            load.start()
        if on_progress is not None:
            on_progress(progress)

    return tell


def _in_processes(
    runs: Sequence[SeedRun], on_progress: OnProgress | None, pool: ProcessPool | None
) -> dict[SeedRun, str]:
    again = "" if all(run.resume for run in runs) else " with --resume"
    lost = "a process that ran a seed was killed, perhaps for lack of memory; run the same "
    with nullcontext(pool) if pool else ProcessPool() as processes:
        hear = on_progress or (lambda _: None)
        ended = processes.run(_run_one, runs, hear=hear, lost=f"{lost}command{again} to continue")
        with closing(ended):
            return {run: why for run, why in ended if why is not None}


def _run_one(run: SeedRun) -> str | None:
    keep_freed_memory()
    try:
        learn_run(run, process_pool.tell)
    except TaskFailed as error:
        return str(error)
    return None


@dataclass(frozen=True)
class _Group:
    """Runs that learn together, as one task of a cluster.

    Attributes:
        number: the index of the group.
        runs: the runs, without their streams.
        streams: references to their streams in the cluster's object store.
    """

    number: int
    runs: list[SeedRun]
    streams: list[Any]

    @property
    def folders(self) -> list[Path]:
        return [run.folder for run in self.runs]

    def moved(self, to: Mapping[Path, Path]) -> "_Group":
        return replace(self, runs=[replace(run, out=to[run.folder]) for run in self.runs])


class _Message(NamedTuple):
    """Progress or a note of a group's runs."""

    group: int
    content: Progress | str


def _on_ray(
    runs: Sequence[SeedRun],
    pool: RayPool,
    on_progress: OnProgress | None,
    note: Callable[[str], None],
) -> dict[SeedRun, str]:
    failures: dict[SeedRun, str] = {}

    def hear(_: SeedRun, said: Progress | str) -> None:
        if isinstance(said, str):
            note(said)
        elif on_progress is not None:
            on_progress(said)

    with closing(groups_on_ray(runs, pool, hear)) as ended:
        for _, outcome in ended:
            if isinstance(outcome, Exception):
                raise outcome
            failures |= outcome
    return failures


def groups_on_ray(
    runs: Sequence[SeedRun], pool: RayPool, hear: Callable[[SeedRun, Progress | str], None]
) -> Generator[tuple[list[SeedRun], dict[SeedRun, str] | Exception], None, None]:
    """Run all runs on a cluster at once, in groups. Yields each group when it has ended, with the
    reasons why runs of it failed, or the error that kept it from running.

    Args:
        hear: called with the first run of a group, and its progress or a note.
    """
    if not runs:
        return
    grouped = _grouped(runs)
    groups = [
        _Group(
            number,
            [replace(run, preloaded=None) for run in some],
            [run.preloaded and pool.put(run.preloaded) for run in some],
        )
        for number, some in enumerate(grouped)
    ]
    ended = pool.run(
        _run_group,
        groups,
        needs=_needs(runs[0]),
        hear=lambda message: hear(grouped[message.group][0], message.content),
        lost="a run was lost several times with the process or node that it ran on",
    )
    with closing(ended):
        for group, outcome in ended:
            some = grouped[group.number]
            if isinstance(outcome, Exception):
                yield some, outcome
                continue
            reasons = zip(some, outcome, strict=True)
            yield some, {run: why for run, why in reasons if why is not None}


def _grouped(runs: Sequence[SeedRun]) -> list[list[SeedRun]]:
    """Groups of one run on the CPU; on a GPU groups of the same settings, which share a graph."""
    if runs[0].config.device != "cuda":
        return [[run] for run in runs]
    alike: dict[str, list[SeedRun]] = {}
    for run in runs:
        alike.setdefault(run.config.but_for_its_seed(), []).append(run)
    return list(alike.values())


def _needs(run: SeedRun) -> Needs:
    """The threads or the share of a GPU that a run needs. A ResNet fills a GPU, an MLP does not."""
    if run.config.device != "cuda":
        return Needs(cpus=run.config.threads)
    return Needs(cpus=1, gpus=0.25 if run.config.net == "mlp" else 1)


def _run_group(group: _Group) -> list[str | None] | Exception:
    def tell(content: Progress | str) -> None:
        process_pool.tell(_Message(group.number, content))

    for run, stream in zip(group.runs, group.streams, strict=True):
        run.preloaded = stream and fetch(stream)
        run.resume = run.resume or (run.folder / CONFIG).exists()  # lost before, and sent again
    try:
        failures = _run_here(group.runs, tell, tell)
    except Exception as error:
        sent = process_pool.sendable(error)
        sent.add_note(traceback.format_exc())  # pickling drops the traceback itself
        return sent
    return [failures.get(run) for run in group.runs]

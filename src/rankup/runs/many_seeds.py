"""Several seeds of one run: together in one graph on a GPU, a process for each core on the CPU;
or on a Ray cluster, a task for each of them, or for each group that a GPU runs in one graph.

A process has one thread, so that a seed's folder holds byte for byte what the seed alone gives with
one thread.
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
    """Run all of these, which may differ in more than the seed; return why any of them failed.

    Args:
        pool: a Ray cluster to run them on, in place of this machine; or processes of this machine
            that stay for what is run later.
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
    """What to say if runs go on with another version of torch than before."""
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
    """Move a stream that several runs share, such as trials of one seed, to the GPU only once."""
    moved: dict[Stream, Stream] = {}
    for run in runs:
        if (stream := run.preloaded) is not None:
            if stream not in moved:
                moved[stream] = stream.to(run.config.device)
            run.preloaded = moved[stream]


def _loading_plots(on_progress: OnProgress | None) -> OnProgress:
    """Progress that, when first reported, also starts to import what will draw the page: Python has
    time for it while it waits for a GPU."""
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
    """Runs that are one piece of work on a cluster. Their streams are in its object store."""

    number: int
    runs: list[SeedRun]
    streams: list[Any]  # references

    @property
    def folders(self) -> list[Path]:
        return [run.folder for run in self.runs]

    def moved(self, to: Mapping[Path, Path]) -> "_Group":
        return replace(self, runs=[replace(run, out=to[run.folder]) for run in self.runs])


class _Told(NamedTuple):
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
    """Runs on a cluster, all at once, in groups as they end: why any of a group failed, or what
    kept the whole group from running.

    Args:
        hear: called with what is told of a run, or of the first of a group.
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
        hear=lambda told: hear(grouped[told.group][0], told.content),
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
    """On the CPU each run by itself; on a GPU seeds of the same settings, which share a graph."""
    if runs[0].config.device != "cuda":
        return [[run] for run in runs]
    alike: dict[str, list[SeedRun]] = {}
    for run in runs:
        alike.setdefault(run.config.but_for_its_seed(), []).append(run)
    return list(alike.values())


def _needs(run: SeedRun) -> Needs:
    """Its threads, or its share of a GPU: a ResNet fills one, an MLP does not."""
    if run.config.device != "cuda":
        return Needs(cpus=run.config.threads)
    return Needs(cpus=1, gpus=0.25 if run.config.net == "mlp" else 1)


def _run_group(group: _Group) -> list[str | None] | Exception:
    def tell(content: Progress | str) -> None:
        process_pool.tell(_Told(group.number, content))

    for run, stream in zip(group.runs, group.streams, strict=True):
        run.preloaded = stream and fetch(stream)
        run.resume = run.resume or (run.folder / CONFIG).exists()  # lost before, and sent again
    try:
        failures = _run_here(group.runs, tell, tell)
    except Exception as error:
        sent = process_pool.sendable(error)
        sent.add_note(traceback.format_exc())  # which is not sent with it otherwise
        return sent
    return [failures.get(run) for run in group.runs]

"""Several seeds of one run: together in one graph on a GPU, a process for each core on the CPU.

A process has one thread, so that a seed's folder holds byte for byte what the seed alone gives with
one thread.
"""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from importlib import import_module

from rankup.data.streams import Stream
from rankup.runs import process_pool
from rankup.runs.folder import other_torch
from rankup.runs.records import unsealed_note
from rankup.runs.run import OnProgress, Progress, SeedRun, learn_run, run_together
from rankup.training.loop import TaskFailed
from rankup.utils.malloc import keep_freed_memory


def run_seeds(
    runs: Sequence[SeedRun],
    *,
    on_progress: OnProgress | None = None,
    note: Callable[[str], None],
) -> dict[SeedRun, str]:
    """Run all of these, which may differ in more than the seed; return why any of them failed."""
    if other := _other_torch(runs):
        note(other)
    if old := unsealed_note(run.folder for run in runs):
        note(old)
    on_gpu = runs[0].config.device == "cuda"
    if len(runs) > 1 and not on_gpu:
        return _in_processes(runs, on_progress)
    if on_gpu:
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


def _in_processes(runs: Sequence[SeedRun], on_progress: OnProgress | None) -> dict[SeedRun, str]:
    again = "" if all(run.resume for run in runs) else " with --resume"
    ended = process_pool.in_processes(
        _run_one,
        runs,
        _cores(),
        hear=on_progress or (lambda _: None),
        lost="a process that ran a seed was killed, perhaps for lack of memory; run the same "
        f"command{again} to continue",
    )
    with closing(ended):
        return {run: why for run, why in ended if why is not None}


def _cores() -> int:
    """How many cores this process may use, if the system tells."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def _run_one(run: SeedRun) -> str | None:
    keep_freed_memory()
    try:
        learn_run(run, process_pool.tell)
    except TaskFailed as error:
        return str(error)
    return None

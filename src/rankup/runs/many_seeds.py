"""Several seeds of one run: together in one graph on a GPU, a process for each core on the CPU.

A process has one thread, so that a seed's folder holds byte for byte what the seed alone gives with
one thread.
"""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from rankup.data.heldout import hold_out
from rankup.data.streams import Stream, make_stream
from rankup.runs import process_pool
from rankup.runs.folder import RunConfig, other_torch
from rankup.runs.records import read_lines
from rankup.runs.run import OnProgress, Progress, SeedRun, run, run_together
from rankup.training.loop import TaskFailed


@dataclass(frozen=True)
class Seed:
    """One seed's run: what is asked for, where its data is, and where it goes."""

    config: RunConfig
    data: Path | None
    out: Path
    resume: bool
    made: Stream | None = None  # its stream, if already made

    def stream(self) -> Stream:
        if self.made is not None:
            return self.made
        config = self.config
        count = config.tasks_in_stream or config.tasks
        whole = make_stream(
            config.stream, tasks=count, seed=config.seed, data=self.data, progress=False
        )
        made = whole.first(config.tasks)
        return hold_out(made, config.held_out, config.seed) if config.held_out else made


def run_seeds(
    seeds: Sequence[Seed],
    *,
    on_progress: OnProgress | None = None,
    note: Callable[[str], None],
) -> dict[int, str]:
    """Run all seeds; return why any of them failed, by seed."""
    failures = run_all(seeds, on_progress=on_progress, note=note)
    return {seed.config.seed: failures[seed.out] for seed in seeds if seed.out in failures}


def run_all(
    seeds: Sequence[Seed],
    *,
    on_progress: OnProgress | None = None,
    note: Callable[[str], None],
) -> dict[Path, str]:
    """Run all of these, which may differ in more than the seed; return why any of them failed, by
    folder."""
    if other := _other_torch(seeds):
        note(other)
    on_gpu = seeds[0].config.device == "cuda"
    if len(seeds) == 1 or on_gpu:
        streams = _on_their_device(seeds)
        runs = [
            SeedRun(seed.config, stream, seed.out, seed.resume)
            for seed, stream in zip(seeds, streams, strict=True)
        ]
        tell = _loading_plots(on_progress) if on_gpu else on_progress
        failures = run_together(runs, on_progress=tell, note=note)
        return {out: str(why) for out, why in failures.items()}
    return _in_processes(seeds, on_progress)


def _other_torch(seeds: Sequence[Seed]) -> str:
    """What to say if runs go on with another version of torch than before."""
    going = [seed for seed in seeds if len(read_lines(seed.out)) < seed.config.tasks]
    found = [(s, before) for s in going if (before := other_torch(s.config, s.out))]
    if not found:
        return ""
    first, before = found[0]
    others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return (
        f"{first.out}{others} was started with torch {', then '.join(before)} and continues with "
        f"{first.config.versions['torch']}: its bits may not be those of one version alone"
    )


def _on_their_device(seeds: Sequence[Seed]) -> list[Stream]:
    """Their streams. Trials of one seed share a stream, which is moved to a GPU only once."""
    there: dict[int, Stream] = {}
    for seed in seeds:
        if seed.made is not None and id(seed.made) not in there:
            there[id(seed.made)] = seed.made.to(seed.config.device)
    return [seed.stream() if seed.made is None else there[id(seed.made)] for seed in seeds]


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


def _in_processes(seeds: Sequence[Seed], on_progress: OnProgress | None) -> dict[Path, str]:
    again = "" if all(seed.resume for seed in seeds) else " with --resume"
    ended = process_pool.in_processes(
        _run_one,
        seeds,
        _cores(),
        hear=on_progress or (lambda _: None),
        lost="a process that ran a seed was killed, perhaps for lack of memory; run the same "
        f"command{again} to continue",
    )
    with closing(ended):
        return {seed.out: why for seed, why in ended if why is not None}


def _cores() -> int:
    """How many cores this process may use, if the system tells."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def _run_one(seed: Seed) -> str | None:
    try:
        run(seed.config, seed.stream(), seed.out, resume=seed.resume, on_progress=process_pool.tell)
    except TaskFailed as error:
        return str(error)
    return None

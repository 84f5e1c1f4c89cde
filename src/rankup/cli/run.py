"""The command `rankup run`."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankup.cli.options import (
    one_of,
    refuse_factors,
    refuse_if_not_begun,
    refuse_softness,
    was_given,
    with_method_options,
    with_request,
)
from rankup.cli.report import show_runs
from rankup.distributed.torchrun import is_follower, process_group
from rankup.errors import RankupError
from rankup.methods import METHODS
from rankup.methods import method_options as check_options
from rankup.runs.mirror import folder_of_rank
from rankup.runs.request import Device, Request
from rankup.training.logs import Tool, check_tool

if TYPE_CHECKING:
    from rankup.distributed.ranks import Ranks
    from rankup.runs.seed_run import SeedRun


@with_method_options
@with_request
def run(
    ctx: typer.Context,
    method: Annotated[
        str, typer.Option(help="Method; see `rankup methods`.", autocompletion=one_of(METHODS))
    ] = "rank",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Run folder, else runs/STREAM-METHOD-SEED; for several seeds the folder of "
            "their folders, else runs/STREAM-METHOD."
        ),
    ] = None,
    log: Annotated[
        Tool | None, typer.Option(help="Draw curves with this, in the folder logs.")
    ] = None,
    *,
    request: Request,
    method_options: dict[str, Any],
) -> None:
    """Learn a stream task after task and show what was remembered.

    Without options: ten tasks of permuted digits on the CPU, within a minute. Writes a folder with
    config.json, metrics.jsonl, the network in net/ and a page, report.html. `--resume --out FOLDER`
    continues a run as it was started; with more --tasks than before, a run of the rank update
    learns further permutations or rotations. `torchrun --nproc-per-node N -m rankup run` divides
    every batch among N processes, or GPUs.
    """
    if log is not None:
        check_tool(log)
        if request.on:
            raise RankupError("--log is for runs on this machine: leave it or --on out")
    with process_group(request.device is not Device.cpu) as ranks:
        if ranks is None:
            _run(ctx, method, out, request, method_options, log)
            return
        if request.seeds > 1 or request.on:
            raise RankupError(
                "torchrun divides one run among processes: leave --seeds and --on out, or run "
                "without it"
            )
        with folder_of_rank(out or _root(method, request), ranks) as folder:
            _run(ctx, method, folder, request, method_options, log, ranks)


def _root(method: str, request: Request) -> Path:
    name = f"{request.stream_name}-{method}"
    return Path("runs") / (name if request.seeds > 1 else f"{name}-{request.seed}")


def _run(
    ctx: typer.Context,
    method: str,
    out: Path | None,
    request: Request,
    method_options: dict[str, Any],
    log: Tool | None,
    ranks: "Ranks | None" = None,
) -> None:
    from rankup.cli.progress import SeedBars, bars, note
    from rankup.runs.folder import tasks_more, tasks_of, write_configs
    from rankup.runs.launch import Launch, can_compute_on
    from rankup.runs.many_seeds import run_seeds
    from rankup.runs.ray_pool import pool_on
    from rankup.runs.records import CONFIG, as_begun, runs_in

    if request.resume and out:
        refuse_if_not_begun(ctx, "run", out, bool(runs_in(out)))
        given = partial(was_given, ctx)
        method, method_options, request = as_begun(method, method_options, request, out, given)
    check_options(method, method_options)
    if ranks is not None and method != "rank":
        raise RankupError(f"only the method rank can be divided among processes, not {method}")
    if method != "rank":
        refuse_factors(ctx, f"{method} has no factors")
    refuse_softness(ctx, method_options)
    seeds, root = request.seeds, out or _root(method, request)
    if seeds > 1 and (root / CONFIG).exists():
        raise RankupError(f"{root} already holds a run of one seed: name another folder with --out")
    if request.resume and request.tasks is None:  # more tasks than before must be asked for
        request = replace(request, tasks=tasks_of(_folders(root, request).values()))
    launch = Launch(request)
    folders = _folders(root, request)
    runs = launch.of(method, method_options, folders)
    _check(runs)
    if can_compute_on(launch.device):
        runs[0].warn_if_capped()  # here, because otherwise every process would warn
    with bars() as shown:
        if request.resume and (more := max(tasks_more(r.config, r.folder) for r in runs)):
            note(shown, f"{root} continues to {launch.tasks} tasks, {more} more than before")
        show = SeedBars(shown, launch.tasks, seeds).show
        # All folders are made before the first seed begins: resuming finds all seeds by them.
        write_configs({run.folder: run.config for run in runs})
        for run in runs:
            run.resume = True
            run.log = None if is_follower() else log
        with pool_on(request.on) as pool:
            failures = run_seeds(runs, on_progress=show, note=partial(note, shown), pool=pool)
    if not is_follower() and (whole := _finished(root)):
        show_runs(whole, root / "report.html")
    if failures:
        failed = {run.config.seed: why for run, why in failures.items()}
        raise RankupError(_failed(failed, folders))


def _folders(root: Path, request: Request) -> dict[int, Path]:
    """A folder for each seed; that of a single one is `root`, unless it was begun among others."""
    folders = {seed: root / f"seed-{seed}" for seed in request.all_seeds}
    alone = len(folders) == 1 and not folders[request.seed].exists()
    return {request.seed: root} if alone else folders


def _check(runs: "Sequence[SeedRun]") -> None:
    """Refuse runs that cannot begin or go on while all folders are as they were: where one of them
    is to be made or changed, all that were begun are read before."""
    from rankup.runs.folder import check_folder, is_to_be_written
    from rankup.runs.launch import can_compute_on
    from rankup.runs.records import CONFIG

    if not can_compute_on(runs[0].config.device):  # only the nodes of a cluster can
        for run in runs:
            check_folder(run.config, run.folder, run.resume)
        return
    runs[0].check()
    for run in runs[1:]:
        check_folder(run.config, run.folder, run.resume)
    if any(is_to_be_written(run.config, run.folder) for run in runs):
        for run in runs[1:]:
            if (run.folder / CONFIG).exists():
                replace(run).check()  # a copy, whose network is let go


def _finished(root: Path) -> list[Path]:
    """The runs in a folder that have learned all their tasks, those of seeds that were not asked
    for this time, too: the folder has one page, which is of all."""
    from rankup.runs.folder import tasks_of
    from rankup.runs.records import read_lines, runs_in

    return [run for run in runs_in(root) if len(read_lines(run)) == tasks_of([run])]


def _failed(failures: dict[int, str], folders: dict[int, Path]) -> str:
    """Why the first of the seeds failed that did, and what is left of it."""
    seed, why = next(iter(failures.items()))
    which = f"seed {seed}: " if len(folders) > 1 else ""
    more = len(failures) - 1
    others = f" (and {more} more seed{'s' if more > 1 else ''} failed)" if more else ""
    net = folders[seed] / "net"
    left = f"what was learned before is intact in {net}; " if net.exists() else ""
    return f"{which}{why}{others}; {left}a new run with other settings needs another --out"

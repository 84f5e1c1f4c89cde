"""The command `rankup paper`."""

import shlex
import sys
import time
from collections.abc import Container, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankup.cli.compare import ALL
from rankup.cli.options import one_of, was_given
from rankup.errors import RankupError
from rankup.paper import PARTS, experiments_of, part
from rankup.runs.request import Device

if TYPE_CHECKING:
    from rankup.paper.experiment import Experiment
    from rankup.paper.plots import Figure
    from rankup.paper.results import Results
    from rankup.paper.runner import Runner
    from rankup.paper.tables import Table


def paper(
    ctx: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            help="A table or figure, or all; without it, lists them and what is done.",
            autocompletion=one_of([*PARTS, ALL]),
        ),
    ] = None,
    results: Annotated[
        Path, typer.Option(help="Results folder; those of several machines can be merged.")
    ] = Path("runs/paper"),
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Run only what contains this, e.g. p-mnist or 'ewc & width 256'; can be repeated."
        ),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(help="Settings to run at once on a GPU, each with all its seeds.", min=1),
    ] = 1,
    share: Annotated[
        str, typer.Option(help="Run only a share, for one of several processes: 1/4, …, 4/4.")
    ] = "1/1",
    minutes: Annotated[
        float | None, typer.Option(help="Start nothing new after this long.", min=0)
    ] = None,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="Run only the trials that choose settings, no rows with them."),
    ] = False,
    left: Annotated[
        bool,
        typer.Option(
            "--left", help="Run nothing; say what is left, and about how long with so many --jobs."
        ),
    ] = False,
    show: Annotated[
        bool,
        typer.Option("--show", help="Run nothing, show results so far; figures go beside them."),
    ] = False,
    page: Annotated[
        Path | None, typer.Option(help="Also write all that is shown to this Markdown file.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of data sets, else $RANKUP_DATA.")] = (
        None
    ),
    download: Annotated[bool, typer.Option("--download", help="Download missing data.")] = False,
    device: Annotated[Device, typer.Option(help="Where to compute.")] = Device.auto,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="ray|ray://HOST:PORT",
            help="Run on a Ray cluster: a local one, or that named here or by RAY_ADDRESS.",
        ),
    ] = None,
) -> None:
    """Reproduce a table or figure of the paper, its values beside ours.

    Runs what has not been run, each setting with all its seeds, and shows the table; what was not
    run is marked. If stopped, the same command continues. Results are files named after what was
    run: nothing is run twice, whichever table needs it.
    """
    from rankup.paper.results import Results

    if results.exists() and not results.is_dir():
        raise RankupError(f"--results must be a folder, but {results} is a file")
    stored = Results(results)
    if name is None:
        for option in ctx.params:
            if option not in ("results", "device") and was_given(ctx, option):
                raise RankupError(f"--{option} needs a table or figure: name one, or all")
        from rich.console import Console

        from rankup.paper.overview import overview
        from rankup.report.tables import print_table
        from rankup.runs.launch import chosen_device

        print_table(Console(), overview(stored, chosen_device(device)))
        return
    if page is not None and not page.suffix:  # without it, the name is that of its picture folder
        raise RankupError(f"a page's name needs an ending, such as .md, got {page}")
    if show and only:
        raise RankupError("--only chooses what to run, but --show runs nothing")
    if show and not results.is_dir():
        raise RankupError(f"there is no results folder {results}: name one with --results")
    parts = {title: part(title).given(stored) for title in (PARTS if name == ALL else [name])}
    if left:
        _tell_left(name, parts, stored, only or [], jobs, tune)
        return
    failed: list[Experiment] = []
    if not show:
        from rankup.paper.runner import Runner
        from rankup.paper.runner import share as share_of
        from rankup.runs.launch import chosen_device
        from rankup.runs.ray_pool import check_address

        command = shlex.join(["rankup", *_without_folders(sys.argv[1:])])
        runner = Runner(stored, device, data, command, download)
        elsewhere = check_address(on) is not None
        if jobs > 1 and chosen_device(device, elsewhere) == "cpu":
            raise RankupError("--jobs is for a GPU; on the CPU each seed has a core already")
        ran: set[Experiment] = set()
        begun = time.monotonic()
        # Trials decide what else there is to run.
        while wanted := _only(name, parts, only or [], tune, ran):
            spent = (time.monotonic() - begun) / 60
            failed += _run(runner, share_of(wanted, share), minutes, spent, jobs, on)
            ran.update(wanted)
            parts = {title: each.given(stored) for title, each in parts.items()}
    from rankup.paper.render import show_parts, write_page

    show_parts(parts, stored)
    if page is not None:
        write_page(parts, stored, page)
    if failed:
        raise typer.Exit(1)


def _without_folders(words: Sequence[str]) -> list[str]:
    """A command as others would repeat it.

    >>> _without_folders(["paper", "rank", "--data", "mine", "--jobs", "4", "--results=here"])
    ['paper', 'rank', '--jobs', '4']
    """
    paths = ("--data", "--results", "--page")
    pairs = zip(["", *words], words, strict=False)
    return [word for before, word in pairs if not {before, word.split("=")[0]} & {*paths}]


def _only(
    name: str,
    parts: "Mapping[str, Table | Figure]",
    words: Sequence[str],
    tune: bool,
    ran: "Container[Experiment]" = (),
) -> "list[Experiment]":
    """What was asked for and did not run before."""
    experiments = experiments_of(parts.values())
    if not ran:
        for word in words:
            if not any(_has(each, word) for each in experiments):
                raise RankupError(f"nothing in {name} has {word!r} in its description")
    return [each for each in experiments if each not in ran and _is_asked(each, words, tune)]


def _is_asked(experiment: "Experiment", words: Sequence[str], tune: bool) -> bool:
    if tune and experiment.held_out is None:
        return False
    return not words or any(_has(experiment, word) for word in words)


def _has(experiment: "Experiment", word: str) -> bool:
    """Whether its description has a word, or all that stand between signs of &."""
    description = str(experiment)
    return all(one.strip() in description for one in word.split("&"))


def _tell_left(
    name: str,
    parts: "Mapping[str, Table | Figure]",
    results: "Results",
    words: Sequence[str],
    jobs: int,
    tune: bool,
) -> None:
    """Say what is left, a line for each stream, network and width."""
    from rich.console import Console

    from rankup.paper.estimates import left_of, main_machine, pace_on
    from rankup.paper.tables import Table
    from rankup.report.tables import print_line

    known = experiments_of(part(title).given(results) for title in PARTS)
    machine = main_machine(known, results)
    tables = [shown for shown in parts.values() if isinstance(shown, Table)]
    later = [each for table in tables for each in table.stand_ins()]
    wanted = _only(name, parts, words, tune)
    wanted += [each for each in later if _is_asked(each, words, tune)]
    pace = pace_on(machine, known, results) if machine else {}
    cases = left_of(wanted, results, pace, jobs)
    for case in cases:
        print_line(Console(), str(case))
    where = f", as fast as on one {machine}" if machine else ""
    print_line(Console(), f"With --jobs {jobs}{where}." if cases else "Nothing is left.")


def _run(
    runner: "Runner",
    experiments: "Sequence[Experiment]",
    minutes: float | None,
    spent: float,
    jobs: int,
    on: str | None,
) -> "list[Experiment]":
    """Run what is left to run, in what is left of the minutes; return what failed."""
    from rankup.cli.progress import ExperimentBars, bars, note
    from rankup.paper.runner import Message
    from rankup.runs.ray_pool import pool_on

    left, done, failed, reasons = runner.left(experiments), 0, [], set()
    with bars("run the same command to continue") as shown, pool_on(on) as pool:
        lines = ExperimentBars(shown, len(left))

        def show(message: Message) -> None:
            experiment, content = message
            if isinstance(content, str):
                note(shown, f"{experiment}: {content}")
            else:
                lines.show(experiment, experiment.learned, content)

        remaining = None if minutes is None else max(0.0, minutes - spent)
        running = runner.run_all(left, show, jobs=jobs, minutes=remaining, pool=pool)
        with closing(running) as finished:
            for experiment, why, seconds in finished:
                done += 1
                lines.end(experiment)
                failed += [experiment] if why else []
                if not why:
                    reached = f"{_reached(runner, experiment)}, {seconds:.0f} s"
                else:
                    reached = "failed for the same reason" if why in reasons else f"failed: {why}"
                    reasons.add(why)
                note(shown, f"{experiment}: {reached}")
        if done < len(left):
            note(shown, f"stopped after {minutes:g} minutes; {len(left) - done} left to run")
    return failed


def _reached(runner: "Runner", experiment: "Experiment") -> str:
    from rankup.runs.read import spread

    measured = runner.results.of(experiment)
    assert measured is not None
    return f"accuracy {spread(measured.accuracy)} %"

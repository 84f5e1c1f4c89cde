"""The command `rankup paper`. Heavy imports happen inside."""

import shlex
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankup.cli_compare import ALL
from rankup.cli_options import Device
from rankup.errors import RankupError
from rankup.paper import PARTS, part

if TYPE_CHECKING:
    from rankup.paper.cells import Cell
    from rankup.paper.results import Results
    from rankup.paper.running import Runner


def paper(
    name: Annotated[
        str | None,
        typer.Argument(help="A table or figure, or all; without one, what there is and is done."),
    ] = None,
    results: Annotated[
        Path, typer.Option(help="The folder of results; those of several machines can be merged.")
    ] = Path("runs/paper"),
    only: Annotated[
        str | None, typer.Option(help="Run only what this is a part of, as p-mnist or ewc.")
    ] = None,
    share: Annotated[
        str, typer.Option(help="Run only a share, for one of several processes: 1/4, …, 4/4.")
    ] = "1/1",
    minutes: Annotated[
        float | None, typer.Option(help="Begin nothing new after so long.", min=0)
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Run nothing, show what is there.")] = False,
    page: Annotated[
        Path | None, typer.Option(help="Write all that is shown to this Markdown file, too.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Where data sets are, else $RANKUP_DATA.")] = (
        None
    ),
    device: Annotated[Device, typer.Option(help="Where to compute.")] = Device.auto,
) -> None:
    """Reproduce a table or figure of the paper, its value beside ours.

    Runs what has not been run, each setting with all its seeds, and shows the table; what was not
    run is marked so. The same command goes on where it was stopped. Results are files named by what
    was run: nothing is run twice, whichever table asks for it.
    """
    from rankup.paper.results import Results

    found = Results(results)
    if name is None:
        _overview(found)
        return
    parts = {each: part(each) for each in (PARTS if name == ALL else [name])}
    cells = list(dict.fromkeys(own for each in parts.values() for own in each.cells()))
    if not show:
        from rankup.paper import running

        command = shlex.join(["rankup", *sys.argv[1:]])
        wanted = [own for own in running.share(cells, share) if only is None or only in str(own)]
        if only is not None and not wanted:
            raise RankupError(f"nothing of {name} has {only!r} in its description")
        _run(running.Runner(found, device, data, command), wanted, minutes)
    from rankup.paper.showing import show_parts, write_page

    show_parts(parts, found)
    if page is not None:
        write_page(parts, found, page)


def _run(runner: "Runner", cells: "Sequence[Cell]", minutes: float | None) -> None:
    from rankup.progress import SeedBars, bars, note

    left, started = runner.left(cells), time.monotonic()
    with bars(again="the same command") as shown:
        line = shown.add_task("", total=len(left), state="")
        for number, own in enumerate(left):
            if minutes is not None and time.monotonic() - started > 60 * minutes:
                note(shown, f"stopped after {minutes:g} minutes; {len(left) - number} left to run")
                break
            which = f"{number + 1}/{len(left)}: {own}"
            shown.update(line, description=which, completed=number)
            missing = runner.results.missing(own)
            seeds = SeedBars(shown, own.tasks or 20, len(missing))
            begun = time.monotonic()
            why = runner.run(own, seeds.show, partial(note, shown))
            seeds.close()
            took = f"{time.monotonic() - begun:.0f} s"
            note(
                shown, f"{own}: failed: {why}" if why else f"{own}: {_reached(runner, own)}, {took}"
            )


def _reached(runner: "Runner", own: "Cell") -> str:
    from rankup.report.text import spread

    measured = runner.results.of(own)
    assert measured is not None
    return f"accuracy {spread([each / 100 for each in measured.accuracy])} %"


def _overview(results: "Results") -> None:
    """What there is, how much of it is done, and the time that took."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from rankup.report.text import duration

    table = Table("name", "what", box=box.SIMPLE_HEAD)
    for heading in ("done", "of", "time"):
        table.add_column(heading, justify="right")
    for name, about in PARTS.items():
        cells = part(name).cells()
        measured = {own: found for own in cells if (found := results.of(own)) is not None}
        whole = [own for own in measured if not results.missing(own)]
        spent = sum(found.seconds * len(found.runs) for found in measured.values())
        table.add_row(name, about.help, str(len(whole)), str(len(cells)), duration(spent))
    Console().print(table)

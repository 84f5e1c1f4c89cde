"""`rankup report`, and what every run ends with: a page and a table."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from rankup.cli.compare import in_text, show_comparison
from rankup.errors import RankupError


def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Run folders to show side by side, or a comparison's.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Page to write, else report.html in the first folder.")
    ] = None,
) -> None:
    """Write a page about one run or several, or about a comparison, and print their table."""
    from rankup.report import is_comparison

    page = out or folders[0] / "report.html"
    folders = [run for folder in folders for run in _runs_to_show(folder)]
    if is_comparison(folders[0]) and len(folders) == 1:
        show_comparison(folders[0], page)
    else:
        show_runs(folders, page)


def _runs_to_show(folder: Path) -> list[Path]:
    """The folder, or of one that holds several seeds' runs those that have learned something."""
    from rankup.runs.records import read_lines, runs_in

    runs = runs_in(folder) or [folder]
    learned = [run for run in runs if len(runs) == 1 or read_lines(run)]
    if 0 < len(learned) < len(runs):
        left_out = ", ".join(run.name for run in runs if run not in learned)
        print(f"rankup: {left_out}: nothing has been learned yet", file=sys.stderr)
    return learned or runs


def show_runs(paths: list[Path], page: Path) -> None:
    """Write the page of one run or of several, and print their table: whichever of both cannot be
    written, the other is."""
    from rich.console import Console

    from rankup.cli.progress import tell
    from rankup.report import comparison_table, is_comparison, read_run, run_table, write_report
    from rankup.report.page import checked_page
    from rankup.report.printing import print_table

    checked_page(page)
    if compared := next(filter(is_comparison, paths), None):
        raise RankupError(f"{compared} is a comparison, which can only be shown alone")
    read = [read_run(path) for path in paths]
    runs = [replace(run, config=in_text(run.config)) for run in read]
    console = Console()
    try:
        written = write_report(runs, page)
    finally:
        print_table(console, run_table(runs[0]) if len(runs) == 1 else comparison_table(runs))
    tell(console, f"A page with plots: {written}")

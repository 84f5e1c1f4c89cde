"""The command `rankup report`, and the page and table that every run ends with."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankup.errors import RankupError

if TYPE_CHECKING:
    from rich.console import Console

    from rankup.runs.comparison import Comparison


def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Run folders to show side by side, or a comparison's.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Page to write, else report.html in the first folder.")
    ] = None,
) -> None:
    """Write a page about one run or several, or about a comparison, and print their table."""
    from rankup.runs.comparison import is_comparison
    from rankup.runs.records import runs_below, unlisted_note, unsealed_note

    runs = [run for folder in folders for run in runs_below(folder)]
    for note in filter(None, (unsealed_note(runs), unlisted_note(runs))):
        print(f"rankup: {note}", file=sys.stderr)
    page = out or folders[0] / "report.html"
    folders = [run for folder in folders for run in _runs_to_show(folder)]
    if is_comparison(folders[0]) and len(folders) == 1:
        show_comparison(folders[0], page)
        return
    if compared := next(filter(is_comparison, folders), None):
        raise RankupError(f"{compared} is a comparison, which can only be shown alone")
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

    from rankup.report.page import checked_page, write_report
    from rankup.report.tables import comparison_table, print_line, print_table, run_table
    from rankup.runs.read import read_run

    checked_page(page)
    runs = [read_run(path) for path in paths]
    console = Console()
    try:
        written = write_report(runs, page)
    finally:
        print_table(console, run_table(runs[0]) if len(runs) == 1 else comparison_table(runs))
    print_line(console, f"A page with plots: {written}")


def show_comparison(root: Path, page: Path, as_json: bool = False) -> "Comparison":
    """Write the page and files of a comparison, and print its tables or JSON: whichever of both
    cannot be written, the other is."""
    from rich.console import Console

    from rankup.report.comparison.export import as_json as json_of
    from rankup.report.comparison.page import write_comparison
    from rankup.report.page import checked_page
    from rankup.report.tables import print_line
    from rankup.runs.comparison import read_comparison

    checked_page(page)
    comparison = read_comparison(root)
    console = Console()
    try:
        written = write_comparison(comparison, page)
    finally:
        if as_json:
            print(json_of(comparison))
        else:
            _print_comparison(console, comparison)
    if not as_json:
        print_line(console, f"A page with plots: {written}")
    return comparison


def _print_comparison(console: "Console", comparison: "Comparison") -> None:
    from rankup.report.comparison.text import differences_table, failures, methods_table
    from rankup.report.tables import print_line, print_table

    print_table(console, methods_table(comparison))
    if differences := differences_table(comparison):
        print_table(console, differences)
    for failure in failures(comparison):
        print_line(console, failure)

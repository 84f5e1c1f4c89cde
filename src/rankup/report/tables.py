"""Tables for the terminal: runs in 80 columns, and printing that cuts off nothing where it is
narrow."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rankup.report.text import (
    UNTOLD,
    count,
    duration,
    labels,
    mean_results,
    so_far,
    untold_cells,
)
from rankup.runs.read import Run, percent

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table


def run_table(run: Run) -> Table:
    """A run's accuracy on each task, when it was learned and now, and what was forgotten."""
    about = "forgetting is averaged over all tasks but the last"
    table = titled(so_far(f"{run.method} on {run.stream}", run), caption=about)
    table.show_footer = True
    table.add_column("#", justify="right")
    table.add_column("task", "average", overflow="fold", ratio=1)
    matrix = run.matrix
    learned = [row[-1] for row in matrix.rows]
    table.add_column("when learned %", percent(sum(learned) / len(learned)), justify="right")
    table.add_column("now %", percent(matrix.average_accuracy()), justify="right")
    table.add_column("forgetting", percent(matrix.forgetting()), justify="right")
    untold = [column for column in (run.untold, run.guessed) if column]
    for heading, column in zip(("untold %", "task guessed %"), untold, strict=False):
        table.add_column(heading, percent(column.average_accuracy()), justify="right")
    for index, name in enumerate(run.tasks):
        before, now = learned[index], matrix.rows[-1][index]
        more = [percent(column.rows[-1][index]) for column in untold]
        numbers = percent(before), percent(now), percent(before - now)
        add_row(table, str(index + 1), name, *numbers, *more)
    return table


def comparison_table(runs: Sequence[Run]) -> Table:
    """A row for each run, and one for the mean of each setting that several seeds have finished."""
    streams = ", ".join(dict.fromkeys(run.stream for run in runs))
    table = titled(streams, caption="parameters and replay buffer in float32 numbers")
    table.add_column("method", overflow="fold", ratio=1)
    has_untold = any(run.untold for run in runs)
    for heading in (
        "accuracy %",
        *UNTOLD * has_untold,
        "forgetting",
        "parameters",
        "replay",
        "time",
    ):
        table.add_column(heading, justify="right")
    for name, run in zip(labels(runs), runs, strict=True):
        accuracy, forgetting = run.matrix.average_accuracy(), run.matrix.forgetting()
        results = percent(accuracy), *untold_cells([run]) * has_untold, percent(forgetting)
        storage = count(run.parameters), count(run.buffer)
        add_row(table, so_far(name, run), *results, *storage, duration(run.seconds))
    for mean in mean_results(runs):
        more = ("untold", "guessed") * has_untold
        keys = ("name", "accuracy", *more, "forgetting", "parameters", "buffer", "time")
        table.add_section()
        add_row(table, *(mean[key] for key in keys))
    return table


def titled(title: str, caption: str | None = None) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    return Table(title=Text(title, style="bold"), caption=caption, box=box.SIMPLE_HEAD)


def add_row(table: Table, *cells: str) -> None:
    from rich.text import Text

    # As text, because a name may hold square brackets, which would be taken for markup.
    table.add_row(*(Text(cell) for cell in cells))


def right_aligned(first: str, *headings: str) -> Table:
    """A table without lines whose columns, but for the first, hold numbers."""
    from rich.table import Table

    table = Table(box=None)
    table.add_column(first, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def print_line(console: Console, text: str) -> None:
    """Print a line verbatim: a path may look like markup."""
    console.print(text, soft_wrap=True, markup=False, emoji=False, highlight=False)


def print_table(console: Console, table: Table) -> None:
    """Print a table in which headings and then the column of names may be folded. Names break only
    between words; if that is not enough, lines are longer than the terminal, which wraps or
    scrolls them."""
    if table.__rich_measure__(console, _unbounded(console)).maximum > console.width:
        _fold_headings(table)
    _keep_words(console, table)
    if _least_width(console, table) <= console.width:
        console.print(table)
        return
    had_edge, table.show_edge = table.show_edge, False  # it is blank
    if _least_width(console, table) <= console.width:
        console.print(table)
        console.print()
        return
    table.show_edge = had_edge
    _print_wider(console, table)


def print_note(console: Console, text: str) -> None:
    """Print a sentence verbatim, in a terminal broken between words."""
    soft_wrap = not console.is_terminal
    console.print(text, soft_wrap=soft_wrap, markup=False, emoji=False, highlight=False)


def _fold_headings(table: Table) -> None:
    for column in table.columns:
        if column.overflow != "fold" and isinstance(column.header, str):
            column.header = re.sub(" (?!%)", "\n", column.header)  # accuracy % stays one word


def _keep_words(console: Console, table: Table) -> None:
    from rich.measure import measure_renderables

    for column in table.columns:
        cells = [column.header, *column.cells, column.footer]
        size = measure_renderables(console, _unbounded(console), cells)
        column.no_wrap = column.overflow != "fold"
        needed = size.maximum if column.no_wrap else size.minimum
        column.min_width = max(needed, column.min_width or 0)


def _least_width(console: Console, table: Table) -> int:
    return table.__rich_measure__(console, _unbounded(console)).minimum


def _unbounded(console: Console) -> ConsoleOptions:
    return console.options.update(width=10_000)


def _print_wider(console: Console, table: Table) -> None:
    """Print a table wider than the terminal, but title and caption in the terminal's width."""
    title, caption = table.title, table.caption
    table.title = table.caption = None
    table.width = table.__rich_measure__(console, _unbounded(console)).maximum
    if title:
        console.print(title, style="table.title", justify="center", highlight=False)
    console.print(table, crop=False)
    if caption:
        console.print(caption, style="table.caption", highlight=False)

"""Runs as tables for the terminal, readable in 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rankup.report.comparison.text import HEADINGS, cells, notes
from rankup.report.text import count, duration, labels, mean_results, percent, so_far
from rankup.runs.comparison import Comparison
from rankup.runs.read import Run

if TYPE_CHECKING:
    from rich.table import Table


def run_table(run: Run) -> Table:
    """A run's accuracy on each task, when it was learned and now, and what was forgotten."""
    about = "forgetting is averaged over all tasks but the last"
    table = _table(so_far(f"{run.method} on {run.stream}", run), caption=about)
    table.show_footer = True
    table.add_column("#", justify="right")
    table.add_column("task", "average", overflow="fold", ratio=1)
    matrix = run.matrix
    learned = [row[-1] for row in matrix.rows]
    table.add_column("when learned %", percent(sum(learned) / len(learned)), justify="right")
    table.add_column("now %", percent(matrix.average_accuracy()), justify="right")
    table.add_column("forgetting", percent(matrix.forgetting()), justify="right")
    for index, name in enumerate(run.tasks):
        before, now = learned[index], matrix.rows[-1][index]
        _add_row(table, str(index + 1), name, percent(before), percent(now), percent(before - now))
    return table


def comparison_table(runs: Sequence[Run]) -> Table:
    """A row for each run, and one for the mean of each setting that several seeds have finished."""
    streams = ", ".join(dict.fromkeys(run.stream for run in runs))
    table = _table(streams, caption="parameters and replay buffer in float32 numbers")
    table.add_column("method", overflow="fold", ratio=1)
    for heading in ("accuracy %", "forgetting", "parameters", "replay", "time"):
        table.add_column(heading, justify="right")
    for name, run in zip(labels(runs), runs, strict=True):
        accuracy, forgetting = run.matrix.average_accuracy(), run.matrix.forgetting()
        results = percent(accuracy), percent(forgetting)
        storage = count(run.parameters), count(run.buffer)
        _add_row(table, so_far(name, run), *results, *storage, duration(run.seconds))
    for mean in mean_results(runs):
        keys = ("name", "accuracy", "forgetting", "parameters", "buffer", "time")
        table.add_section()
        _add_row(table, *(mean[key] for key in keys))
    return table


def methods_table(comparison: Comparison) -> Table:
    """A row for each method, the best first."""
    table = _table(comparison.stream, caption="; ".join(notes(comparison)))
    # With as little space between columns as possible: six of them have to fit.
    table.show_edge, table.padding, table.caption_justify = False, (0, 0, 0, 1), "left"
    table.add_column("method", overflow="fold", ratio=1, min_width=9)
    for heading in HEADINGS[1:]:
        table.add_column(heading.removesuffix(" buffer"), justify="right", no_wrap=True)
    for entry in comparison.ranked:
        _add_row(table, *cells(entry))
    return table


def _table(title: str, caption: str | None = None) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    return Table(title=Text(title, style="bold"), caption=caption, box=box.SIMPLE_HEAD)


def _add_row(table: Table, *cells: str) -> None:
    from rich.text import Text

    # As text, because a name may hold square brackets, which would be taken for markup.
    table.add_row(*(Text(cell) for cell in cells))

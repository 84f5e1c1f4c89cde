"""Tables and notes for terminals that may be narrow: nothing is cut off, and no word is broken."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table


def print_table(console: Console, table: Table) -> None:
    """Print a table in which only the column of names may be folded. Names break only between
    words; if that is not enough, lines are longer than the terminal, which wraps or scrolls
    them."""
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

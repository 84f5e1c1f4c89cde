"""A comparison in words: its table, the notes below it, a summary and the settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rankup.report.tables import add_row, titled
from rankup.report.text import NOTHING, UNTOLD, count, duration, plain, settings, untold_cells
from rankup.runs.comparison import Comparison, Entry
from rankup.runs.read import percent, signed, spread

if TYPE_CHECKING:
    from rich.table import Table

_HEADINGS = ("method", "accuracy %", "forgetting", "parameters", "replay buffer", "time")

_PAIRED = "points of accuracy, paired over seeds: mean ± standard error"

_OF_A_RUN = ("method", "seed", "task_names")  # not settings of a method


def headings(comparison: Comparison) -> tuple[str, ...]:
    """Of the table's columns: with those of tests without the task, if there were any, and that of
    `differences` last, if there are any."""
    first, second, *rest = _HEADINGS
    return first, second, *UNTOLD * _is_untold(comparison), *rest, *_difference_heading(comparison)


def _is_untold(comparison: Comparison) -> bool:
    return any(entry.untold for entry in comparison.shown)


def cells(comparison: Comparison, entry: Entry) -> tuple[str, ...]:
    """A row of the comparison's table, under its `headings`."""
    untold = _is_untold(comparison)
    paired = (_difference(comparison, entry),) * bool(comparison.reference)
    if not entry.runs:
        failed = "failed" if entry.failed else "unfinished"
        return entry.name, failed, *(NOTHING,) * (4 + len(UNTOLD) * untold), *paired
    return (
        entry.name,
        spread(entry.accuracy),
        *untold_cells(entry.runs) * untold,
        spread(entry.forgetting),
        count(entry.parameters),
        count(entry.buffer),
        duration(entry.seconds),
        *paired,
    )


def _difference_heading(comparison: Comparison) -> list[str]:
    reference = comparison.reference
    return [f"difference to {reference.method}"] if reference else []


def _difference(comparison: Comparison, entry: Entry) -> str:
    difference = comparison.difference(entry)
    if difference is None:
        return NOTHING
    some = "" if difference.seeds == comparison.seeds else f" ({difference.seeds} seeds)"
    return f"{signed(difference.mean)} ± {percent(difference.error)}{some}"


def methods_table(comparison: Comparison) -> Table:
    """A row for each method, the best first. The column of differences, for which 80 columns are
    too few, is `differences_table`."""
    shown = len(headings(comparison)) - len(_difference_heading(comparison))
    table = titled(comparison.stream, caption="; ".join(_facts(comparison)))
    # With as little space between columns as possible: six of them have to fit.
    table.show_edge, table.padding, table.caption_justify = False, (0, 0, 0, 1), "left"
    table.add_column("method", overflow="fold", ratio=1, min_width=9)
    for heading in headings(comparison)[1:shown]:
        table.add_column(heading.removesuffix(" buffer"), justify="right", no_wrap=True)
    for entry in comparison.ranked:
        add_row(table, *cells(comparison, entry)[:shown])
    return table


def differences_table(comparison: Comparison) -> Table | None:
    """How far each method is from the first; None with fewer than two seeds or methods."""
    if not (heading := _difference_heading(comparison)):
        return None
    table = titled(heading[0], caption=_PAIRED)
    table.show_edge, table.padding, table.caption_justify = False, (0, 0, 0, 1), "left"
    table.min_width = len(_PAIRED)
    table.add_column("method", overflow="fold", ratio=1)
    table.add_column("points", justify="right", no_wrap=True)
    for entry in comparison.ranked:
        if comparison.difference(entry):
            add_row(table, entry.method, _difference(comparison, entry))
    return table


def notes(comparison: Comparison) -> list[str]:
    """Facts that one needs to read the table."""
    facts = _facts(comparison)
    return [*facts, f"differences in {_PAIRED}"] if comparison.reference else facts


def _facts(comparison: Comparison) -> list[str]:
    seeds = comparison.seeds
    facts = [
        f"mean ± standard deviation of {seeds} seeds" if seeds > 1 else "one seed",
        "parameters and replay buffer in float32 numbers",
        "time of one seed",
    ]
    if not all(entry.continual for entry in comparison.entries):
        facts.append("* not continual: it has the data of all tasks at once")
    return facts


def failures(comparison: Comparison) -> list[str]:
    return [f"{entry.method} failed: {entry.failed}" for entry in comparison.failed]


def summary(comparison: Comparison) -> str:
    """One sentence on how it went."""
    shown, total = comparison.shown, len(comparison.entries)
    if not shown:
        return f"None of {total} methods has learned {comparison.stream} yet"
    tasks = len(shown[0].matrix)
    sentence = (
        f"{len(shown)} {'method' if len(shown) == 1 else 'methods'} learned {tasks} "
        f"{'task' if tasks == 1 else 'tasks'} of {comparison.stream}"
    )
    if comparison.seeds > 1:
        each = "each" if all(entry.whole for entry in shown) else "or fewer"
        sentence += f" with {comparison.seeds} seeds {each}"
    if total > len(shown):
        sentence = f"Of {total} methods, {len(shown)} learned" + sentence.split(" learned", 1)[1]
    # A method that is not continual is best only because it is given more.
    best = next((e for e in comparison.ranked if e.runs and e.continual), comparison.ranked[0])
    return (
        f"{sentence}; the best on average is {best.method}: {spread(best.accuracy)} %, forgetting "
        f"{spread(best.forgetting)}"
    )


def common_and_differing(
    comparison: Comparison,
) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """The settings that all methods have in common, and by method those that differ."""
    by_method = {e.method: _merged(e, settings) for e in comparison.entries if e.configs}
    names = dict.fromkeys(name for config in by_method.values() for name in config)
    common = {
        name: values.pop()
        for name in names
        if len(values := {config.get(name, NOTHING) for config in by_method.values()}) == 1
    }
    differing = {
        method: {name: value for name, value in config.items() if name not in common}
        for method, config in by_method.items()
    }
    return common, differing


def columns(entry: Entry) -> dict[str, str]:
    """Every setting under a unique name, such as `recipe.lr`."""
    return _merged(entry, _dotted)


def _merged(entry: Entry, flat: Callable[[Mapping[str, Any]], dict[str, str]]) -> dict[str, str]:
    """The settings of all seeds; where they differ, all values."""
    configs = [flat({k: v for k, v in c.items() if k not in _OF_A_RUN}) for c in entry.configs]
    names = dict.fromkeys(name for config in configs for name in config)
    return {
        name: " / ".join(dict.fromkeys(config.get(name, NOTHING) for config in configs))
        for name in names
    }


def _dotted(config: Mapping[str, Any]) -> dict[str, str]:
    flat = {}
    for key, value in config.items():
        inner = value if isinstance(value, dict) else {"": value}
        for name, entry in inner.items():
            flat[f"{key}.{name}".rstrip(".")] = "" if entry in (None, "") else plain(entry)
    return flat

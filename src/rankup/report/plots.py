"""Plots of runs: average accuracy as tasks come in, the accuracy matrix, and the selectors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rankup.report.figures import (
    Theme,
    draw_averages,
    draw_matrix,
    every,
    finish_heat_map,
    new_figure,
    percent_range,
    write_figures,
)
from rankup.report.text import labels
from rankup.runs.read import Array, Run, seed_groups

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The page shows an inch as about a hundred pixels, so that 10-point type is nearly as large as the
# text around it; plots are no wider, to stay readable on a phone.
WIDE = 5.6
NARROW = 4.8
MOST_STACKED = 6  # layers one above the other; more are put in two columns

# More columns than this cannot be told apart: neighbours are drawn as their mean.
_MOST_COLUMNS = 200
# Seeded factors may be thousands where a task adds one: they get at most this share of a plot.
_SEEDED_SHARE = 0.45


def write_plots(runs: Sequence[Run], folder: Path) -> list[str]:
    """Write the plots of all runs and return their names. Runs are numbered from 1, as in
    `matrix-1`."""
    return write_figures(lambda theme: _figures(runs, theme), folder)


def _figures(runs: Sequence[Run], theme: Theme) -> dict[str, Figure]:
    figures = {"average": average_plot(runs, theme)}
    entries = [100 * entry for run in runs for row in run.matrix.rows for entry in row]
    low, high = percent_range(min(entries), max(entries), least=10)
    # Of runs that differ only in their seeds, the first represents all.
    repeated = {id(run) for group in seed_groups(runs) for run in group[1:]}
    for number, run in enumerate(runs, start=1):
        if id(run) in repeated:
            continue
        figures[f"matrix-{number}"] = matrix_plot(run, low, high)
        if run.selectors:
            figures[f"selectors-{number}"] = selectors_plot(run, theme)
    return figures


def average_plot(runs: Sequence[Run], theme: Theme) -> Figure:
    """A_t after each task, a line per run."""
    names = labels(runs)
    columns = max(1, min(len(runs), 58 // (max(map(len, names)) + 6)))  # of the legend
    figure = new_figure(WIDE, 3.2 + 0.2 * math.ceil(len(runs) / columns))
    averages = [100 * run.matrix.average_accuracies() for run in runs]
    draw_averages(figure.add_subplot(), dict(zip(names, averages, strict=True)), theme)
    if len(runs) > 1:  # above the plot, where it covers no line
        figure.legend(loc="outside upper left", ncols=columns)
    return figure


def matrix_plot(run: Run, low: float, high: float) -> Figure:
    """a[t, j] in per cent: a row for each task learned, a column for each task measured. Colours
    go from `low` to `high`, the same for all runs shown together."""
    accuracy = 100 * run.matrix.as_array()
    tasks = len(accuracy)
    figure = new_figure(NARROW, 4.1)
    axes = figure.add_subplot()
    image = draw_matrix(axes, accuracy, low, high, ticks=12)
    finish_heat_map(figure, axes, image, "accuracy (%)")
    if tasks <= 20:
        digits = 1 if tasks <= 10 else 0
        size = min(9.0, 90 / tasks) if digits else min(8.0, 130 / tasks)
        for t, j in zip(*np.tril_indices(tasks), strict=True):
            # Dark on the light half of the colour scale, light on the dark half.
            ink = "#10151c" if accuracy[t, j] > low + 0.6 * (high - low) else "#ffffff"
            text = f"{accuracy[t, j]:.{digits}f}"
            axes.text(int(j), int(t), text, ha="center", va="center", size=size, color=ink)
    return figure


def selectors_plot(run: Run, theme: Theme) -> Figure:
    """|s| for each layer: a row for each task, a column for each factor it can select from."""
    tasks = max(len(table) for table in run.selectors.values())
    columns = 1 if len(run.selectors) <= MOST_STACKED else 2
    rows = math.ceil(len(run.selectors) / columns)
    height = 0.9 + min(2.0, 0.18 * tasks)
    figure = new_figure(WIDE * columns, 0.3 + height * rows)
    for index, (layer, table) in enumerate(run.selectors.items()):
        axes = figure.add_subplot(rows, columns, index + 1)
        axes.set_title(layer)
        _draw_selectors(figure, axes, np.abs(table), run.factors[layer], theme)
        if index >= len(run.selectors) - columns:
            axes.set_xlabel("factors, by the task that added them")
        if index % columns == 0:
            axes.set_ylabel("task")
    return figure


def _draw_selectors(
    figure: Figure, axes: Axes, strength: Array, factors: list[int], theme: Theme
) -> None:
    columns: list[Array] = []
    edges = [0.0]
    centres: dict[int, float] = {}
    between: dict[float, float] = {}  # widths of separating lines, by position
    for source, (start, stop, width) in enumerate(_groups(factors)):
        if start == stop:
            continue
        total = factors[0] if source == 0 else sum(factors[1:])
        bins = math.ceil((stop - start) / math.ceil(total / _MOST_COLUMNS))
        # A task can select all factors of a group or none, so no mean mixes numbers with nan.
        groups = np.array_split(strength[:, start:stop], bins, axis=1)
        columns += [group.mean(axis=1) for group in groups]
        left = edges[-1]
        edges += [left + width * (index + 1) / bins for index in range(bins)]
        if left:
            between[left] = 4 if source == 1 else min(1.5, 20 / len(factors))
        centres[source] = left + width / 2
    tasks = len(strength)
    # Otherwise a few selectors far above the rest would leave all others dark.
    top = float(np.nanpercentile(strength, 99)) or 1.0
    mesh = axes.pcolormesh(
        edges, np.arange(tasks + 1), np.stack(columns, axis=1), cmap="viridis", vmin=0, vmax=top
    )
    axes.vlines(list(between), 0, tasks, theme.surface, linewidths=list(between.values()), zorder=2)
    axes.invert_yaxis()
    rows = every(tasks, most=10)
    axes.set_yticks([t - 0.5 for t in rows], [str(t) for t in rows])
    axes.set_xticks(*_source_ticks(centres, factors[0], width=edges[-1]))
    extend = "max" if np.nanmax(strength) > top else "neither"
    finish_heat_map(figure, axes, mesh, "|selector|", extend=extend)


def _groups(factors: list[int]) -> list[tuple[int, int, float]]:
    """Where the factors from each source start and stop, and how wide they are drawn: the seeded
    ones first, then those of each task."""
    seeded, learned = factors[0], sum(factors[1:])
    most = learned * _SEEDED_SHARE / (1 - _SEEDED_SHARE)
    widths = [min(seeded, most) if learned else seeded, *factors[1:]]
    stops = np.cumsum(factors).tolist()
    return list(zip([0, *stops[:-1]], stops, widths, strict=True))


def _source_ticks(
    centres: dict[int, float], seeded: int, width: float
) -> tuple[list[float], list[str]]:
    """Names under the factors from each source: as many of the tasks' as fit side by side."""
    character = width / 54
    for step in itertools.count(1):
        shown = [source for source in centres if source < 2 or source % step == 0]
        names = [{0: f"{seeded:,} seeded", 1: "task 1"}.get(s, str(s)) for s in shown]
        places = [centres[source] for source in shown]
        gaps = [right - left for left, right in itertools.pairwise(places)]
        needed = [(len(a) + len(b)) / 2 + 1 for a, b in itertools.pairwise(names)]
        if step > len(centres) or all(
            gap >= need * character for gap, need in zip(gaps, needed, strict=True)
        ):
            break
    return places, names

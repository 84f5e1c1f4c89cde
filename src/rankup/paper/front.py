"""The figure at equal budgets: accuracy over the bytes that a method stores, with the Pareto front:
all that nothing else beats in both."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankup.paper.budgets import BUDGETS, Budget, contenders, for_people
from rankup.paper.experiment import Experiment
from rankup.paper.plots import Figure, Lines
from rankup.paper.results import Measured, Results
from rankup.paper.tables import Row
from rankup.report.figures import Theme, colour, marker, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

BOUND = "multitask"  # has all tasks at once, so it stands beside the front
_BETWEEN = ", width "

_NOTE = (
    "The rows of the tables at equal budgets, both widths in one picture, the narrower one hollow. "
    "The line is the front: nothing that learns one task after another stores less and is as "
    "accurate. Multitask, a bound, does not count for it."
)


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which points no other beats: with fewer bytes and at least as accurate, or more accurate with
    no more bytes; the smallest first. Of equal points all count.

    >>> front([(10, 0.9), (20, 0.8), (5, 0.7)])
    [2, 0]
    """
    kept = [number for number, point in enumerate(points) if not _is_beaten(point, points)]
    return sorted(kept, key=points.__getitem__)


def _is_beaten(point: tuple[float, float], points: Sequence[tuple[float, float]]) -> bool:
    return any(other != point and other[0] <= point[0] and other[1] >= point[1] for other in points)


@dataclass(frozen=True)
class FrontFigure(Figure):
    budgets: Sequence[Budget] = BUDGETS
    rows: Sequence[Row] = ()  # of the tables

    def given(self, results: Results) -> FrontFigure:
        return figure_front(self.budgets, results)

    def experiments(self) -> list[Experiment]:
        trials = [trial for row in self.rows for trial in row.trials]
        return list(dict.fromkeys([*trials, *super().experiments()]))


def figure_front(
    budgets: Sequence[Budget] = BUDGETS, results: Results | None = None
) -> FrontFigure:
    """Accuracy over bytes at equal budgets, a picture for each stream and network."""
    rows: list[Row] = []
    panels: dict[str, dict[str, Experiment]] = {}
    for budget in budgets:
        panel = panels.setdefault(budget.pair, {})
        for row in (contender.row(results) for contender in contenders(budget)):
            rows.append(row)
            if row.experiment is not None:
                panel[f"{row.name}{_BETWEEN}{budget.width}"] = row.experiment
    title = "Accuracy over bytes at equal budgets"
    return FrontFigure(title, panels, draw, _NOTE, budgets, rows)


def draw(pair: str, lines: Lines, theme: Theme) -> Drawing:
    figure = new_figure(6.4, 4.6)
    axes = figure.add_subplot()
    points = {name: (shown.bytes, 100 * _mean(shown)) for name, shown in lines.items()}
    _draw_points(axes, points, theme)
    _draw_front(axes, points, theme)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(_in_bytes)
    axes.set_xlabel("bytes stored after all tasks")
    axes.set_ylabel("average accuracy (%)")
    axes.margins(x=0.08, y=0.12)  # room for names
    axes.grid(axis="both")
    axes.set_title(for_people(pair))
    figure.legend(loc="outside upper left", ncols=4, fontsize=9)
    return figure


def _draw_points(axes: Axes, points: Mapping[str, tuple[float, float]], theme: Theme) -> None:
    names = list(dict.fromkeys(name.rpartition(_BETWEEN)[0] for name in points))
    widest = max(_width(name) for name in points)
    # The widest come first, as the legend shows the first of each name.
    for full, (size, accuracy) in sorted(points.items(), key=lambda item: -_width(item[0])):
        name = full.rpartition(_BETWEEN)[0]
        number = names.index(name)
        hollow = _width(full) < widest
        axes.plot(
            [size],
            [accuracy],
            linestyle="none",
            color=colour(theme, number),
            marker=marker(number),
            markersize=8,
            markerfacecolor=theme.surface if hollow else colour(theme, number),
            label=None if name in axes.get_legend_handles_labels()[1] else name,
            zorder=3,
        )


def _draw_front(axes: Axes, points: Mapping[str, tuple[float, float]], theme: Theme) -> None:
    """A line of steps, and the names of those on it."""
    learners = {name: point for name, point in points.items() if not name.startswith(BOUND)}
    best = [[*learners.items()][number] for number in front([*learners.values()])]
    sizes, accuracies = [x for _, (x, _) in best], [y for _, (_, y) in best]
    axes.plot(
        sizes, accuracies, drawstyle="steps-post", color=theme.muted, linewidth=1.2, label="front"
    )
    for name, point in best:
        axes.annotate(
            name.rpartition(_BETWEEN)[0],
            point,
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=theme.muted,
        )


def _width(name: str) -> int:
    return int(name.rpartition(_BETWEEN)[2])


def _mean(measured: Measured) -> float:
    return statistics.mean(measured.accuracy)


def _in_bytes(size: float, _: float) -> str:
    """A tick of the axis.

    >>> _in_bytes(1e5, 0), _in_bytes(1e6, 0), _in_bytes(100, 0)
    ('100 kB', '1 MB', '100 B')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:g} {unit}"
    return f"{size:g} B"

"""Runs as PNG files, each in light and in dark: average accuracy as tasks come in, the accuracy
matrix, and the selectors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rankup.report.runs import Array, Run, seed_groups
from rankup.report.text import labels
from rankup.report.theme import DARK, LIGHT, MARKERS, Theme, colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

DPI = 160
# The page shows an inch as about a hundred pixels, so that type of 10 points is nearly as large as
# the text around it; plots are no wider, or nobody could read them on a phone.
WIDE = 5.6
NARROW = 4.8
MOST_STACKED = 6  # layers one above the other; more stand in two columns

# More columns than this cannot be told apart: neighbours are drawn as their mean.
_MOST_COLUMNS = 200
# Seeded factors may be thousands where a task adds one: they get at most this share of a plot.
_SEEDED_SHARE = 0.45


def write_plots(runs: Sequence[Run], folder: Path) -> list[str]:
    """Write the plots of all runs and return their names: `average` is in `average.png` and
    `average-dark.png`, and so on. Runs are numbered from 1, as in `matrix-1`."""
    import matplotlib

    with matplotlib.rc_context(_style(LIGHT)):
        figures = _figures(runs, LIGHT)
        for name, figure in figures.items():
            _lay_out(figure)
            _save(figure, folder / f"{name}{LIGHT.suffix}.png")
            _hold_labels(figure)
            _recolour(figure, LIGHT, DARK)
            _save(figure, folder / f"{name}{DARK.suffix}.png")
    return list(figures)


def _figures(runs: Sequence[Run], theme: Theme) -> dict[str, Figure]:
    figures = {"average": average_plot(runs, theme)}
    entries = [100 * entry for run in runs for row in run.matrix.rows for entry in row]
    low, high = _spread(min(entries), max(entries), least=10)
    # Of runs that differ in their seeds alone, the first stands for all.
    repeated = {id(run) for group in seed_groups(runs) for run in group[1:]}
    for number, run in enumerate(runs, start=1):
        if id(run) in repeated:
            continue
        figures[f"matrix-{number}"] = matrix_plot(run, low, high)
        if run.selectors:
            figures[f"selectors-{number}"] = selectors_plot(run, theme)
    return figures


def _lay_out(figure: Figure) -> None:
    """Once: a figure that keeps its engine is laid out whenever it is drawn."""
    for axis in _axises(figure):
        if not axis.get_label_text():
            axis.set_label_coords(0, 0)  # else a place is looked for, label or not
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
        figure.set_layout_engine("none")


def _hold_labels(figure: Figure) -> None:
    """Where they were drawn: who draws the figure again does not look for their places."""
    for axis in _axises(figure):
        axis.set_label_coords(*axis.label.get_position(), axis.label.get_transform())


def _axises(figure: Figure) -> list[Axis]:
    return [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]


def _save(figure: Figure, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    # Not savefig, which draws everything once more for a layout that is there already. Without the
    # library's version in the file, equal plots are equal files.
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(path, metadata={"Software": None})


def _recolour(figure: Figure, old: Theme, new: Theme) -> None:
    """Takes whatever has a colour of one theme to the other, in less time than to draw it anew."""
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_hex
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.text import Text

    # Text has colours of its own: on a heat map it may be as white as a surface elsewhere.
    inks = {old.text: new.text, old.muted: new.muted}
    tints = {old.surface: new.surface, old.line: new.line}
    tints |= dict(zip(old.runs, new.runs, strict=True))

    def ink(given: Any) -> Any:
        return inks.get(to_hex(given), given)

    def tint(given: Any) -> Any:
        return tints.get(to_hex(given), given)

    for artist in figure.findobj():
        if isinstance(artist, Text):
            artist.set_color(ink(artist.get_color()))
        elif isinstance(artist, Line2D):
            edge = tint(artist.get_markeredgecolor())
            artist.set_color(tint(artist.get_color()))
            artist.set_markeredgecolor(edge)
        elif isinstance(artist, LineCollection):
            artist.set_color([tint(each) for each in artist.get_color()])
        elif isinstance(artist, Patch):
            artist.set_facecolor(tint(artist.get_facecolor()))
            artist.set_edgecolor(tint(artist.get_edgecolor()))


def average_plot(runs: Sequence[Run], theme: Theme) -> Figure:
    """A_t after each task, a line per run."""
    names, lowest, highest = labels(runs), 100.0, 0.0
    columns = max(1, min(len(runs), 58 // (max(map(len, names)) + 6)))  # of the legend
    figure = _figure(WIDE, 3.2 + 0.2 * math.ceil(len(runs) / columns))
    axes = figure.add_subplot()
    for index, run in enumerate(runs):
        tasks = range(1, len(run.matrix) + 1)
        averages = [100 * run.matrix.average_accuracy(t) for t in tasks]
        lowest, highest = min(lowest, *averages), max(highest, *averages)
        axes.plot(
            tasks,
            averages,
            color=colour(theme, index),
            marker=MARKERS[index % len(MARKERS)],
            linestyle=("-", "--", ":")[index // len(theme.runs) % 3],
            label=names[index],
            clip_on=False,
        )
    longest = max(len(run.matrix) for run in runs)
    axes.set_xlim(0.7, longest + 0.3)
    axes.set_xticks(_every(longest, most=20))
    axes.set_ylim(_spread(10 * math.floor(lowest / 10), 10 * math.ceil(highest / 10), least=10))
    axes.set_xlabel("tasks learned")
    axes.set_ylabel("average accuracy (%)")
    axes.grid(axis="y")
    if len(runs) > 1:  # above the plot, where it covers no line
        figure.legend(loc="outside upper left", ncols=columns)
    return figure


def matrix_plot(run: Run, low: float, high: float) -> Figure:
    """a[t, j] in per cent: a row for each task learned, a column for each task measured. Colours
    go from `low` to `high`, which are the same for all runs that are shown together."""
    accuracy = 100 * run.matrix.as_array()
    tasks = len(accuracy)
    figure = _figure(NARROW, 4.1)
    axes = figure.add_subplot()
    image = axes.imshow(accuracy, cmap="viridis", vmin=low, vmax=high, aspect="auto")
    ticks = _every(tasks, most=12)
    axes.set_xticks([t - 1 for t in ticks], [str(t) for t in ticks])
    axes.set_yticks([t - 1 for t in ticks], [str(t) for t in ticks])
    axes.set_xlabel("accuracy on task")
    axes.set_ylabel("after learning task")
    _finish_heat_map(figure, axes, image, "accuracy (%)")
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
    figure = _figure(WIDE * columns, 0.3 + height * rows)
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
    between: dict[float, float] = {}  # how wide lines are
    for source, (start, stop, width) in enumerate(_groups(factors)):
        if start == stop:
            continue
        total = factors[0] if source == 0 else sum(factors[1:])
        bins = math.ceil((stop - start) / math.ceil(total / _MOST_COLUMNS))
        # A task reaches all factors of a group or none, so no mean mixes numbers with nan.
        parts = np.array_split(strength[:, start:stop], bins, axis=1)
        columns += [part.mean(axis=1) for part in parts]
        left = edges[-1]
        edges += [left + width * (index + 1) / bins for index in range(bins)]
        if left:
            between[left] = 4 if source == 1 else min(1.5, 20 / len(factors))
        centres[source] = left + width / 2
    tasks = len(strength)
    # A few selectors far above the rest would leave all others dark.
    top = float(np.nanpercentile(strength, 99)) or 1.0
    mesh = axes.pcolormesh(
        edges, np.arange(tasks + 1), np.stack(columns, axis=1), cmap="viridis", vmin=0, vmax=top
    )
    axes.vlines(list(between), 0, tasks, theme.surface, linewidths=list(between.values()), zorder=2)
    axes.invert_yaxis()
    rows = _every(tasks, most=10)
    axes.set_yticks([t - 0.5 for t in rows], [str(t) for t in rows])
    axes.set_xticks(*_source_ticks(centres, factors[0], width=edges[-1]))
    extend = "max" if np.nanmax(strength) > top else "neither"
    _finish_heat_map(figure, axes, mesh, "|selector|", extend=extend)


def _groups(factors: list[int]) -> list[tuple[int, int, float]]:
    """Where the factors of each source start and stop, and how wide they are drawn: the seeded
    ones first, then those of each task."""
    seeded, learned = factors[0], sum(factors[1:])
    most = learned * _SEEDED_SHARE / (1 - _SEEDED_SHARE)
    widths = [min(seeded, most) if learned else seeded, *factors[1:]]
    stops = np.cumsum(factors).tolist()
    return list(zip([0, *stops[:-1]], stops, widths, strict=True))


def _source_ticks(
    centres: dict[int, float], seeded: int, width: float
) -> tuple[list[float], list[str]]:
    """Names under the factors of each source: as many of the tasks' as fit side by side."""
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


def _finish_heat_map(
    figure: Figure, axes: Axes, image: ScalarMappable, label: str, extend: str = "neither"
) -> None:
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, left=False, bottom=False)
    bar = figure.colorbar(image, ax=axes, pad=0.02, aspect=25, extend=extend, label=label)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, right=False)
    bar.ax.locator_params(nbins=5)


def _spread(low: float, high: float, least: float) -> tuple[float, float]:
    """A range of per cent around `low` to `high`, at least `least` wide."""
    pad = max(0.0, least - (high - low)) / 2
    top = min(100.0, high + pad)
    return max(0.0, min(low, top - least)), top


def _every(tasks: int, most: int) -> list[int]:
    """At most so many task numbers to write at an axis.

    >>> _every(5, most=10), _every(20, most=10)
    ([1, 2, 3, 4, 5], [2, 4, 6, 8, 10, 12, 14, 16, 18, 20])
    """
    step = math.ceil(tasks / most)
    return list(range(step, tasks + 1, step))


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI)
    figure.set_layout_engine("constrained", h_pad=0.12, w_pad=0.08)
    return figure


def _style(theme: Theme) -> Any:
    return {
        "figure.facecolor": theme.surface,
        "axes.facecolor": theme.surface,
        "axes.edgecolor": theme.line,
        "axes.labelcolor": theme.muted,
        "axes.titlecolor": theme.text,
        "axes.titlelocation": "left",
        "axes.titley": 1.0,  # else it is looked for, again and again
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.labelsize": 10,
        "axes.labelpad": 6,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.family": "DejaVu Sans",  # comes with matplotlib: the same plot everywhere
        "font.size": 10,
        "text.color": theme.text,
        "text.parse_math": False,  # a name may hold dollar signs
        "xtick.color": theme.line,
        "ytick.color": theme.line,
        "xtick.labelcolor": theme.muted,
        "ytick.labelcolor": theme.muted,
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
        "grid.color": theme.line,
        "grid.linewidth": 0.8,
        "legend.frameon": False,
        "legend.fontsize": 10,
        "lines.linewidth": 2,
        "lines.markersize": 5.5,
    }

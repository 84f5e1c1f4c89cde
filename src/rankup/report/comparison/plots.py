"""Plots of a comparison: average accuracy as tasks come in, accuracy against memory, and accuracy
matrices. Layout is computed here: matplotlib's own is slow."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rankup.report.comparison.placement import Box, place_labels, spread_apart
from rankup.report.figures import (
    Theme,
    colour,
    every,
    finish_scale,
    is_hollow,
    line_style,
    marker,
    new_figure,
    percent_range,
    quiet,
    write_figures,
)
from rankup.runs.comparison import Comparison, Entry
from rankup.runs.read import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# In inches; the page shows one as about a hundred pixels.
_WIDTH = 8.6
_LINE = 0.19  # from one label to the next
_CHARACTER = 0.083
_MOST_COLUMNS = 5  # heat maps side by side


def write_comparison_plots(comparison: Comparison, folder: Path) -> list[str]:
    """Write the plots and return their names; there are none if no method has results."""
    if not comparison.shown:
        return []
    return write_figures(lambda theme: _figures(comparison.shown, theme), folder)


def _figures(entries: Sequence[Entry], theme: Theme) -> dict[str, Figure]:
    return {
        "average": averages_plot(entries, theme),
        "memory": memory_plot(entries, theme),
        "matrices": matrices_plot(entries),
    }


def averages_plot(entries: Sequence[Entry], theme: Theme) -> Figure:
    """A_t after each task: for each method a line with the mean of all seeds, a band of one
    standard deviation on either side, and its name at the line's end."""
    margin = 0.55 + _CHARACTER * max(len(entry.name) + 6 for entry in entries)
    height = max(3.0, 0.2 + _LINE * len(entries))
    figure = new_figure(_WIDTH, height + 0.75, lay_out=False)
    axes = _axes(figure, 0.75, 0.6, _WIDTH - margin - 0.75, height)
    means = [100 * entry.averages.mean(axis=0) for entry in entries]  # each [T]
    bands = [_deviation(entry) for entry in entries]
    low, high = _tens(np.concatenate(means), np.concatenate(bands))
    tasks = max(map(len, means))
    for entry, mean, band in zip(entries, means, bands, strict=True):
        at = range(1, len(mean) + 1)
        if len(entry.runs) > 1:
            ink = colour(theme, entry.number - 1)
            axes.fill_between(at, mean - band, mean + band, facecolor=ink, alpha=0.15)
        style = _style(entry, theme)
        axes.plot(at, mean, **style, markevery=max(1, tasks // 10), clip_on=False)
    axes.set_xlim(0.7 if tasks < 3 else 1, max(tasks, 2))
    axes.set_ylim(low, high)
    axes.set_xticks(every(tasks, most=20))
    axes.set_xlabel("tasks learned")
    axes.set_ylabel("average accuracy (%)")
    axes.grid(axis="y")
    ends = [float(mean[-1]) for mean in means]
    line = _LINE / height * (high - low)
    for entry, mean, place in zip(
        entries, means, spread_apart(ends, line, low + line / 3, high - line / 3), strict=True
    ):
        _end_label(axes, entry, theme, float(mean[-1]), place)
    return figure


def _end_label(axes: Axes, entry: Entry, theme: Theme, end: float, place: float) -> None:
    """A method's name at the right, connected to the end of its line."""
    ink, beside = colour(theme, entry.number - 1), axes.get_yaxis_transform()
    inch = 1 / (axes.get_position().width * _WIDTH)  # along the axes
    axes.plot(
        [1 + 0.08 * inch, 1 + 0.22 * inch],
        [end, place],
        color=ink,
        linewidth=0.8,
        transform=beside,
        clip_on=False,
    )
    swatch = _style(entry, theme)
    axes.plot(
        [1 + 0.22 * inch, 1 + 0.34 * inch, 1 + 0.46 * inch],
        [place] * 3,
        **swatch,
        markevery=[1],
        transform=beside,
        clip_on=False,
    )
    axes.text(
        1 + 0.55 * inch,
        place,
        f"{entry.name}  {end:.1f}",
        transform=beside,
        va="center_baseline",
        size=9,
    )


def memory_plot(entries: Sequence[Entry], theme: Theme) -> Figure:
    """Accuracy after the last task against all that is stored, a point for each method."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = new_figure(_WIDTH, 4.4, lay_out=False)
    axes = _axes(figure, 0.75, 0.6, _WIDTH - 0.95, 3.65)
    stored = [max(1.0, entry.parameters + entry.buffer) for entry in entries]
    reached = np.array([100 * statistics.mean(entry.accuracy) for entry in entries])
    deviations = np.array([_deviation(entry)[-1] for entry in entries])
    axes.set_xscale("log")
    axes.set_xlim(*_decades(stored))
    axes.set_ylim(_tens(reached, deviations))
    ticks = _memory_ticks(*axes.get_xlim())
    axes.set_xticks(ticks, [_amount(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("stored: parameters and replay buffer, in float32 numbers")
    axes.set_ylabel("average accuracy (%)")
    axes.grid()
    for entry, x, y, deviation in zip(entries, stored, reached, deviations, strict=True):
        ink = colour(theme, entry.number - 1)
        axes.vlines([x], y - deviation, y + deviation, ink, linewidths=1.2)
        axes.plot([x], [y], **{**_style(entry, theme), "markersize": 7.5}, clip_on=False, zorder=3)
    # Labels are placed in pixels, the unit of text sizes.
    canvas: Any = FigureCanvasAgg(figure)
    renderer = canvas.get_renderer()
    # In their points' colours: where points crowd, a label may be as near to another point.
    colours = [colour(theme, entry.number - 1) for entry in entries]
    texts = [
        figure.text(0, 0, entry.name, size=9, color=ink)
        for entry, ink in zip(entries, colours, strict=True)
    ]
    extents = [text.get_window_extent(renderer) for text in texts]
    inch = figure.dpi
    points = [
        tuple(point) for point in axes.transData.transform(list(zip(stored, reached, strict=True)))
    ]
    air = 0.02 * inch  # on every side of a label
    sizes = [(extent.width + 2 * air, extent.height + 2 * air) for extent in extents]
    frame = Box(*axes.bbox.extents)
    boxes = place_labels(points, sizes, frame, clear=0.085 * inch)
    for entry, text, extent, box, point in zip(entries, texts, extents, boxes, points, strict=True):
        text.set_position(
            (
                (box.left + air - extent.x0) / figure.bbox.width,
                (box.bottom + air - extent.y0) / figure.bbox.height,
            )
        )
        away = math.dist(point, _nearest(box, point))
        # Also where the label could be taken for another point's.
        nearer = any(math.dist(other, _nearest(box, other)) < away for other in points)
        if away > 0.2 * inch or nearer:
            _leader(figure, colour(theme, entry.number - 1), point, _nearest(box, point))
    return figure


def _nearest(box: Box, point: tuple[float, float]) -> tuple[float, float]:
    """The place in a box that is nearest to a point."""
    x, y = point
    return min(max(x, box.left), box.right), min(max(y, box.bottom), box.top)


def _leader(figure: Figure, ink: str, point: tuple[float, float], end: tuple[float, float]) -> None:
    """A line from a point to its label."""
    from matplotlib.lines import Line2D

    width, height = figure.bbox.width, figure.bbox.height
    xs, ys = zip(point, end, strict=True)
    line = Line2D([x / width for x in xs], [y / height for y in ys], color=ink, linewidth=0.8)
    figure.add_artist(line)


def matrices_plot(entries: Sequence[Entry]) -> Figure:
    """The accuracy matrices of all methods, each the mean of its seeds, on one colour scale."""
    matrices = [100 * entry.matrix for entry in entries]
    low, high = percent_range(
        min(map(np.nanmin, matrices)), max(map(np.nanmax, matrices)), least=10
    )
    rows = math.ceil(len(entries) / _MOST_COLUMNS)
    columns = math.ceil(len(entries) / rows)
    left, bottom, top, right, between = 0.7, 0.6, 0.32, 0.85, 0.22
    side = min(3.0, (_WIDTH + 1 - left - right + between) / columns - between)
    width = left + columns * (side + between) - between + right
    height = bottom + rows * (side + top + between) - between + 0.05
    figure = new_figure(width, height, lay_out=False)
    tasks = max(map(len, matrices))
    ticks = every(tasks, most=5)
    for index, (entry, matrix) in enumerate(zip(entries, matrices, strict=True)):
        row, column = divmod(index, columns)
        axes = _axes(
            figure,
            left + column * (side + between),
            height - 0.05 - top - side - row * (side + top + between),
            side,
            side,
        )
        image = axes.imshow(matrix, cmap="viridis", vmin=low, vmax=high, aspect="auto")
        axes.set_title(entry.name, size=9.5)
        lowest, leftmost = index + columns >= len(entries), column == 0
        axes.set_xticks([t - 1 for t in ticks], [str(t) if lowest else "" for t in ticks])
        axes.set_yticks([t - 1 for t in ticks], [str(t) if leftmost else "" for t in ticks])
        if lowest:
            axes.set_xlabel("accuracy on task")
        if leftmost:
            axes.set_ylabel("after task")
        quiet(axes)
    scale = _axes(figure, width - right + 0.18, bottom, 0.13, height - bottom - top - 0.05)
    bar = figure.colorbar(image, cax=scale, label="accuracy (%)")
    finish_scale(bar)
    return figure


def _style(entry: Entry, theme: Theme) -> dict[str, Any]:
    """How a method's line and its points look."""
    index = entry.number - 1
    ink = colour(theme, index)
    return {
        "color": ink,
        "linestyle": line_style(theme, index),
        "marker": marker(index),
        "markerfacecolor": theme.surface if is_hollow(theme, index) else ink,
        "linewidth": 1.8,
    }


def _deviation(entry: Entry) -> Array:
    """`[T]`: the standard deviation of the seeds' A_t in per cent; 0 for a single seed."""
    if len(entry.runs) == 1:
        return np.zeros(entry.averages.shape[1])
    deviation: Array = 100 * entry.averages.std(axis=0, ddof=1)
    return deviation


def _tens(means: Array, deviations: Array) -> tuple[float, float]:
    """A range of whole tens of per cent that holds all means and deviations."""
    low, high = float((means - deviations).min()), float((means + deviations).max())
    return percent_range(
        max(0, 10 * math.floor(low / 10)), min(100, 10 * math.ceil(high / 10)), least=10
    )


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """A range for a logarithmic axis with room beside the outermost points, at least a decade."""
    low, high = math.log10(min(values)), math.log10(max(values))
    pad = max(0.12 * (high - low), (1 - (high - low)) / 2)
    return 10 ** (low - pad), 10 ** (high + pad)


def _memory_ticks(low: float, high: float) -> list[float]:
    """About six round numbers as ticks of a logarithmic axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = [m * 10.0**power for power in powers for m in (1, 2, 5)]
    fine = [tick for tick in fine if low <= tick <= high]
    coarse = [10.0**power for power in powers if low <= 10.0**power <= high]
    return fine if len(fine) <= 7 else coarse


def _amount(number: float) -> str:
    """
    >>> _amount(200_000), _amount(1e6), _amount(500)
    ('200k', '1M', '500')
    """
    for size, suffix in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:g}{suffix}"
    return f"{number:g}"


def _axes(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Axes at a place in inches."""
    across, up = figure.get_size_inches()
    return figure.add_axes((left / across, bottom / up, width / across, height / up))

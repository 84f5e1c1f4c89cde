"""Panels that several plots draw into their axes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from rankup.report.figures import every, percent_range
from rankup.report.theme import Theme, colour, line_style, marker
from rankup.runs.read import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage


def draw_averages(axes: Axes, lines: Mapping[str, Array], theme: Theme) -> None:
    """A_t in per cent after each task, `[T]`, a line for each name."""
    for index, (name, averages) in enumerate(lines.items()):
        axes.plot(
            range(1, len(averages) + 1),
            averages,
            color=colour(theme, index),
            marker=marker(index),
            linestyle=line_style(theme, index),
            label=name,
            clip_on=False,
        )
    longest, all_of_them = max(map(len, lines.values())), np.concatenate(list(lines.values()))
    low, high = 10 * math.floor(all_of_them.min() / 10), 10 * math.ceil(all_of_them.max() / 10)
    axes.set_xlim(0.7, longest + 0.3)
    axes.set_xticks(every(longest, most=20))
    axes.set_ylim(percent_range(low, high, least=10))
    axes.set_xlabel("tasks learned")
    axes.set_ylabel("average accuracy (%)")
    axes.grid(axis="y")


def draw_matrix(axes: Axes, matrix: Array, low: float, high: float, ticks: int) -> AxesImage:
    """a[t, j] in per cent: a row for each task learned, a column for each task measured; colours go
    from `low` to `high`, and at most `ticks` tasks are numbered."""
    image = axes.imshow(matrix, cmap="viridis", vmin=low, vmax=high, aspect="auto")
    numbers = every(len(matrix), most=ticks)
    axes.set_xticks([t - 1 for t in numbers], [str(t) for t in numbers])
    axes.set_yticks([t - 1 for t in numbers], [str(t) for t in numbers])
    axes.set_xlabel("accuracy on task")
    axes.set_ylabel("after learning task")
    return image

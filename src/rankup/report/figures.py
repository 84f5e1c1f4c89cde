"""Figures: their colours and style, drawing that several plots share, and files in light and dark.

A plot has the background of the page and so no visible edge. Runs can be told apart without
colours, too: each has a marker, and where colours repeat, lines are dashed and markers hollow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rankup.runs.read import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.cm import ScalarMappable
    from matplotlib.colorbar import Colorbar
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

DPI = 160


@dataclass(frozen=True)
class Theme:
    name: str
    page: str
    surface: str  # of boxes and plots
    text: str
    muted: str
    line: str
    runs: tuple[str, ...]

    @property
    def suffix(self) -> str:
        """The end of a plot's file name, before the extension."""
        return "" if self is LIGHT else f"-{self.name}"


# The runs' colours are Okabe and Ito's, safe for colour-blind eyes, brightened for dark mode.
LIGHT = Theme(
    name="light",
    page="#f4f5f7",
    surface="#ffffff",
    text="#1c2128",
    muted="#5b6573",
    line="#dfe3e8",
    runs=("#0072b2", "#d55e00", "#009e73", "#b8508f", "#c98a00", "#3f9fd8", "#7a5230"),
)
DARK = Theme(
    name="dark",
    page="#0e1116",
    surface="#171b22",
    text="#e4e8ee",
    muted="#98a2b0",
    line="#2c333d",
    runs=("#4fa9e3", "#f08046", "#2fbf95", "#e08fc0", "#edb232", "#8fd0f7", "#c39b77"),
)
THEMES = (LIGHT, DARK)

_MARKERS = "os^DvPX<>phd*8"


def colour(theme: Theme, index: int) -> str:
    return theme.runs[index % len(theme.runs)]


def marker(index: int) -> str:
    return _MARKERS[index % len(_MARKERS)]


def line_style(theme: Theme, index: int) -> str:
    return ("-", "--", ":")[index // len(theme.runs) % 3]


def is_hollow(theme: Theme, index: int) -> bool:
    return line_style(theme, index) != "-"


def write_figures(make: Callable[[Theme], dict[str, Figure]], folder: Path) -> list[str]:
    """Write figures and return their names: `average` is in `average.png` and `average-dark.png`,
    and so on."""
    import matplotlib

    with matplotlib.rc_context(_style(LIGHT)):
        figures = make(LIGHT)
        for name, figure in figures.items():
            _lay_out(figure)
            _save(figure, folder / f"{name}{LIGHT.suffix}.png")
            _hold_labels(figure)
            _recolour(figure, LIGHT, DARK)
            _save(figure, folder / f"{name}{DARK.suffix}.png")
    return list(figures)


def _lay_out(figure: Figure) -> None:
    """Lay out once: a figure that keeps its engine is laid out whenever it is drawn."""
    for axis in _both_axes(figure):
        if not axis.get_label_text():
            axis.set_label_coords(0, 0)  # otherwise its place is computed, label or not
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
        figure.set_layout_engine("none")


def _hold_labels(figure: Figure) -> None:
    """Fix labels where they were drawn, so that drawing again does not recompute their places."""
    for axis in _both_axes(figure):
        axis.set_label_coords(*axis.label.get_position(), axis.label.get_transform())


def _both_axes(figure: Figure) -> list[Axis]:
    return [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]


def _save(figure: Figure, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    # Not savefig, which draws everything once more for a layout that is already done. Without the
    # library's version in the file, equal plots are equal files.
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(path, metadata={"Software": None})


def _recolour(figure: Figure, old: Theme, new: Theme) -> None:
    """Change whatever has a colour of one theme to the other, which is faster than a new figure."""
    from matplotlib.collections import LineCollection, PolyCollection
    from matplotlib.colors import to_hex
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.text import Text

    # Text is mapped separately: on a heat map it may be as white as a surface elsewhere.
    runs = dict(zip(old.runs, new.runs, strict=True))
    muted = {old.muted: new.muted}
    inks = {old.text: new.text} | muted | runs
    tints = {old.surface: new.surface, old.line: new.line} | muted | runs

    def ink(rgb: Any) -> Any:
        return inks.get(to_hex(rgb), rgb)

    def tint(rgb: Any) -> Any:
        return tints.get(to_hex(rgb), rgb)

    for artist in figure.findobj():
        if isinstance(artist, Text):
            artist.set_color(ink(artist.get_color()))
        elif isinstance(artist, Line2D):
            edge, face = artist.get_markeredgecolor(), artist.get_markerfacecolor()
            artist.set_color(tint(artist.get_color()))
            artist.set_markeredgecolor(tint(edge))
            artist.set_markerfacecolor(tint(face))
        elif isinstance(artist, LineCollection):
            artist.set_color([tint(rgb) for rgb in artist.get_color()])
        elif isinstance(artist, PolyCollection):
            artist.set_facecolor([tint(rgb) for rgb in artist.get_facecolor()])
        elif isinstance(artist, Patch):
            artist.set_facecolor(tint(artist.get_facecolor()))
            artist.set_edgecolor(tint(artist.get_edgecolor()))


def draw_averages(axes: Axes, lines: Mapping[str, Array], theme: Theme) -> None:
    """A_t in per cent after each task, `[T]`, a line for each name."""
    for index, (name, averages) in enumerate(lines.items()):
        axes.plot(
            range(1, len(averages) + 1),
            averages,
            color=colour(theme, index),
            marker=marker(index),
            linestyle=line_style(theme, index),
            label=name.encode(errors="replace").decode(),  # it may hold any bytes
            clip_on=False,
        )
    longest, values = max(map(len, lines.values())), np.concatenate(list(lines.values()))
    low, high = 10 * math.floor(values.min() / 10), 10 * math.ceil(values.max() / 10)
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


def finish_heat_map(
    figure: Figure, axes: Axes, image: ScalarMappable, label: str, extend: str = "neither"
) -> None:
    quiet(axes)
    bar = figure.colorbar(image, ax=axes, pad=0.02, aspect=25, extend=extend, label=label)
    finish_scale(bar)


def quiet(axes: Axes) -> None:
    """Remove the frame, which a heat map does not need."""
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, left=False, bottom=False)


def finish_scale(bar: Colorbar) -> None:
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, right=False)
    bar.ax.locator_params(nbins=5)


def percent_range(low: float, high: float, least: float) -> tuple[float, float]:
    """A range in per cent around `low` to `high`, at least `least` wide."""
    pad = max(0.0, least - (high - low)) / 2
    top = min(100.0, high + pad)
    return max(0.0, min(low, top - least)), top


def every(tasks: int, most: int) -> list[int]:
    """At most `most` task numbers as ticks of an axis.

    >>> every(5, most=10), every(20, most=10)
    ([1, 2, 3, 4, 5], [2, 4, 6, 8, 10, 12, 14, 16, 18, 20])
    """
    step = math.ceil(tasks / most)
    return list(range(step, tasks + 1, step))


def new_figure(width: float, height: float, lay_out: bool = True) -> Figure:
    """An empty figure, its size in inches, with automatic layout unless `lay_out` is false."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI)
    if lay_out:
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
        "axes.titley": 1.0,  # otherwise it is computed again and again
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

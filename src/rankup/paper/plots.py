"""The paper's figures, drawn from what was run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rankup.paper import ours, printed
from rankup.paper.cells import Cell, cell
from rankup.paper.mlp import rival
from rankup.paper.ours import EPOCHS
from rankup.paper.results import Results
from rankup.report.figures import every, finish_heat_map, new_figure, percent_range, write_figures
from rankup.report.theme import Theme, colour, line_style, marker

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

Lines = Mapping[str, Cell]  # cells by the names they are shown with


@dataclass(frozen=True)
class Figure:
    """A figure of the paper: a panel for each stream, with a cell for each of its parts."""

    title: str
    panels: Mapping[str, Lines]
    draw: Callable[[str, Lines, Results, Theme], Drawing]

    def cells(self) -> list[Cell]:
        return list(dict.fromkeys(own for lines in self.panels.values() for own in lines.values()))

    def write(self, name: str, results: Results, folder: Path) -> list[str]:
        """Draw the panels that have anything to show, in light and in dark; give back the names of
        their files without their endings."""
        shown = {
            stream: {who: own for who, own in lines.items() if results.of(own) is not None}
            for stream, lines in self.panels.items()
        }

        def make(theme: Theme) -> dict[str, Drawing]:
            return {
                f"{name}-{stream}": self.draw(stream, lines, results, theme)
                for stream, lines in shown.items()
                if lines
            }

        if not any(shown.values()):
            return []
        folder.mkdir(parents=True, exist_ok=True)
        return write_figures(make, folder)


def figure_accuracy() -> Figure:
    """Average accuracy as tasks come in, on four streams."""
    panels = {
        stream: {
            "A-GEM": rival(stream, "agem"),
            "EWC": rival(stream, "ewc"),
            "Orthog-Subspace": rival(stream, "orthog"),
            "iCaRL": rival(stream, "icarl"),
            "rank update": ours.default(stream),
            "rank update, seeded": ours.best(stream),
            "independent networks": cell(stream, "parallel", size="full", epochs=EPOCHS[stream]),
        }
        for stream in printed.STREAMS
    }
    return Figure("Average accuracy as tasks come in", panels, _averages)


def figure_transition() -> Figure:
    """Accuracy on every task after learning each, of EWC, Orthog-Subspace and ours."""
    panels = {
        stream: {
            "EWC": rival(stream, "ewc"),
            "Orthog-Subspace": rival(stream, "orthog"),
            "rank update": ours.default(stream),
        }
        for stream in ("p-mnist", "r-mnist")
    }
    return Figure("Accuracy on every task after learning each", panels, _matrices)


def _averages(stream: str, lines: Lines, results: Results, theme: Theme) -> Drawing:
    figure = new_figure(5.6, 3.9)
    axes = figure.add_subplot()
    lowest, highest, longest = 100.0, 0.0, 1
    for index, (name, own) in enumerate(lines.items()):
        measured = results.of(own)
        assert measured is not None
        mean = 100 * measured.averages.mean(axis=0)
        lowest, highest = min(lowest, *mean), max(highest, *mean)
        longest = max(longest, len(mean))
        axes.plot(
            range(1, len(mean) + 1),
            mean,
            color=colour(theme, index),
            marker=marker(index),
            linestyle=line_style(theme, index),
            label=name,
            clip_on=False,
        )
    axes.set_xlim(0.7, longest + 0.3)
    axes.set_xticks(every(longest, most=20))
    low, high = 10 * math.floor(lowest / 10), 10 * math.ceil(highest / 10)
    axes.set_ylim(percent_range(low, high, least=10))
    axes.set_xlabel("tasks learned")
    axes.set_ylabel("average accuracy (%)")
    axes.set_title(printed.STREAMS[stream])
    axes.grid(axis="y")
    figure.legend(loc="outside upper left", ncols=3)
    return figure


def _matrices(stream: str, lines: Lines, results: Results, theme: Theme) -> Drawing:
    matrices = {}
    for name, own in lines.items():
        measured = results.of(own)
        assert measured is not None
        matrices[name] = 100 * measured.matrix
    entries: Sequence[float] = [e for m in matrices.values() for e in m[~(m != m)].tolist()]
    low, high = percent_range(min(entries), max(entries), least=10)
    figure = new_figure(3.4 * len(matrices) + 0.6, 3.4)
    for index, (name, matrix) in enumerate(matrices.items()):
        axes = figure.add_subplot(1, len(matrices), index + 1)
        image = axes.imshow(matrix, cmap="viridis", vmin=low, vmax=high)
        ticks = every(len(matrix), most=5)
        axes.set_xticks([t - 1 for t in ticks], [str(t) for t in ticks])
        axes.set_yticks([t - 1 for t in ticks], [str(t) for t in ticks])
        axes.set_title(f"{name}, {printed.STREAMS[stream]}" if index == 0 else name)
        axes.set_xlabel("accuracy on task")
        if index == 0:
            axes.set_ylabel("after learning task")
        finish_heat_map(figure, axes, image, "accuracy (%)" if index == len(matrices) - 1 else "")
    return figure

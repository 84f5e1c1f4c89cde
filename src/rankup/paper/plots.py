"""Figures of the paper, drawn from our results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rankup.paper import ours, paper_values
from rankup.paper.experiment import Experiment
from rankup.paper.mlp import rival
from rankup.paper.ours import EPOCHS
from rankup.paper.results import Measured, Results
from rankup.report.figures import (
    Theme,
    draw_averages,
    draw_matrix,
    finish_heat_map,
    new_figure,
    percent_range,
    write_figures,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

Lines = Mapping[str, Measured]  # results by the names they are shown under


@dataclass(frozen=True)
class Figure:
    """A figure of the paper: a panel for each stream, an experiment for each line or matrix."""

    title: str
    panels: Mapping[str, Mapping[str, Experiment]]
    draw: Callable[[str, Lines, Theme], Drawing]
    differs: str = ""  # how our protocol differs from the paper's, or between methods

    def given(self, results: Results) -> Figure:
        """The figure with what earlier results decide."""
        return self

    def experiments(self) -> list[Experiment]:
        return list(dict.fromkeys(chain(*(lines.values() for lines in self.panels.values()))))

    def write(self, name: str, results: Results, folder: Path) -> list[str]:
        """Draw the panels that have anything to show, in light and in dark; return the names of
        their files without extensions."""
        shown = {
            stream: {who: measured for who, ran in lines.items() if (measured := results.of(ran))}
            for stream, lines in self.panels.items()
        }

        def make(theme: Theme) -> dict[str, Drawing]:
            return {
                f"{name}-{stream}": self.draw(stream, lines, theme)
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
            "independent networks": Experiment.of(
                stream, "parallel", size="full", epochs=EPOCHS[stream]
            ),
        }
        for stream in paper_values.STREAMS
    }
    epochs = ", ".join(
        f"{panels[stream]['rank update, seeded'].epochs} for {EPOCHS[stream]} on {name}"
        for stream, name in paper_values.STREAMS.items()
    )
    differs = (
        f"With seeded factors for more epochs than all others ({epochs}), on split streams also "
        "with 1,024 units for 256."
    )
    return Figure("Average accuracy as tasks come in", panels, _averages, differs)


def figure_transition() -> Figure:
    """Accuracy on every task after learning each, for EWC, Orthog-Subspace and ours."""
    panels = {
        stream: {
            "EWC": rival(stream, "ewc"),
            "Orthog-Subspace": rival(stream, "orthog"),
            "rank update": ours.default(stream),
        }
        for stream in ("p-mnist", "r-mnist")
    }
    return Figure("Accuracy on every task after learning each", panels, _matrices)


def _averages(stream: str, lines: Lines, theme: Theme) -> Drawing:
    figure = new_figure(5.6, 3.9)
    axes = figure.add_subplot()
    means = {name: 100 * measured.averages.mean(axis=0) for name, measured in lines.items()}
    draw_averages(axes, means, theme)
    axes.set_title(paper_values.STREAMS[stream])
    figure.legend(loc="outside upper left", ncols=3)
    return figure


def _matrices(stream: str, lines: Lines, theme: Theme) -> Drawing:
    matrices = {name: 100 * measured.matrix for name, measured in lines.items()}
    values = np.concatenate([matrix.ravel() for matrix in matrices.values()])
    low, high = percent_range(np.nanmin(values), np.nanmax(values), least=10)
    figure = new_figure(3.4 * len(matrices) + 0.6, 3.4)
    for index, (name, matrix) in enumerate(matrices.items()):
        axes = figure.add_subplot(1, len(matrices), index + 1)
        image = draw_matrix(axes, matrix, low, high, ticks=5)
        axes.set_aspect("equal")
        axes.set_title(f"{name}, {paper_values.STREAMS[stream]}" if index == 0 else name)
        if index:
            axes.set_ylabel("")
        finish_heat_map(figure, axes, image, "accuracy (%)" if index == len(matrices) - 1 else "")
    return figure

"""Plots of a comparison: what they show, in which colours, and where their labels lie."""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from helpers.comparisons import entry, known_run
from rankup.methods import METHODS
from rankup.report.comparison.placement import Box, place_labels, spread_apart
from rankup.report.comparison.plots import averages_plot, matrices_plot, memory_plot
from rankup.report.figures import (
    DARK,
    LIGHT,
    Theme,
    colour,
    is_hollow,
    line_style,
    marker,
    write_figures,
)
from rankup.runs.comparison import Entry


def many(accuracy: Callable[[int], float], stored: Callable[[int], float]) -> list[Entry]:
    """Twenty-one methods with two seeds and three tasks each."""
    names = ["rank", "finetune", "orthog-subspace", "parallel rank 4", "a-gem", "ewc", "hat"] * 3
    return [
        entry(
            name,
            index + 1,
            [
                known_run([[a], [a, a], [a, a, a + 0.01 * seed]], parameters=stored(index))
                for seed in range(2)
            ],
        )
        for index, name in enumerate(names)
        for a in [accuracy(index)]
    ]


LIKENESSES = {
    "all alike": many(lambda i: 0.9, lambda i: 300_000),
    "in a column": many(lambda i: 0.9 + 0.002 * i, lambda i: 300_000),
    "in a row": many(lambda i: 0.9, lambda i: 300_000 + 5_000 * i),
    "in a corner": many(lambda i: 0.98 if i else 0.1, lambda i: 100_000 if i else 9e6),
    "far apart": many(lambda i: 0.045 * i, lambda i: 1_000 * 2**i),
}


@pytest.mark.parametrize("likeness", LIKENESSES)
@pytest.mark.parametrize("plot", [averages_plot, memory_plot])
def test_labels_do_not_overlap(plot: Any, likeness: str) -> None:
    entries = LIKENESSES[likeness]
    figure = plot(entries, LIGHT)
    renderer = FigureCanvasAgg(figure).get_renderer()
    texts = [*figure.texts, *figure.axes[0].texts]
    assert len(texts) == len(entries) == 21
    boxes = [text.get_window_extent(renderer) for text in texts]
    for one, other in itertools.combinations(boxes, 2):
        assert not Box(*one.extents).overlaps(Box(*other.extents))
    width, height = figure.bbox.size
    for box in boxes:
        assert Box(*box.extents).inside(Box(0, 0, width, height))


@pytest.mark.parametrize("seed", range(5))
def test_labels_lie_near_points_and_over_nothing(seed: int) -> None:
    draw = random.Random(seed)
    frame = Box(0, 0, 900, 500)
    points = [(draw.uniform(20, 880), draw.uniform(20, 480)) for _ in range(14)]
    sizes = [(draw.uniform(30, 170), 16.0) for _ in points]
    boxes = place_labels(points, sizes, frame, clear=10)
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)
    for (x, y), (width, height), box in zip(points, sizes, boxes, strict=True):
        assert (box.right - box.left, box.top - box.bottom) == pytest.approx((width, height))
        assert box.inside(frame)
        assert not any(box.overlaps(Box(a - 10, b - 10, a + 10, b + 10)) for a, b in points)
        apart = max(box.left - x, x - box.right, box.bottom - y, y - box.top)
        assert apart < 60


def test_lone_label_stands_right_of_its_point() -> None:
    (box,) = place_labels([(50, 50)], [(40, 10)], Box(0, 0, 200, 100), clear=5)
    assert box == pytest.approx((55.25, 45, 95.25, 55))
    (box,) = place_labels([(190, 50)], [(40, 10)], Box(0, 0, 200, 100), clear=5)
    assert box.right <= 190


def test_spread_apart_moves_places_as_little_as_possible() -> None:
    assert spread_apart([3, 1, 9], gap=1, low=0, high=10) == [3, 1, 9]
    assert spread_apart([5, 5, 5], gap=1, low=0, high=10) == [4, 5, 6]
    assert spread_apart([10, 10], gap=1, low=0, high=10) == [9, 10]
    assert spread_apart([0, 0], gap=1, low=0, high=10) == [0, 1]
    draw = random.Random(0)
    for _ in range(50):
        wanted = [draw.uniform(0, 10) for _ in range(14)]
        places = spread_apart(wanted, gap=0.7, low=0, high=10)
        in_order = [place for _, place in sorted(zip(wanted, places, strict=True))]
        assert all(b - a >= 0.7 - 1e-9 for a, b in itertools.pairwise(in_order))
        assert -1e-9 <= min(places) <= max(places) <= 10 + 1e-9


def test_plots_show_means_over_seeds() -> None:
    seeds = [known_run([[0.9], [0.5, 0.7]]), known_run([[0.7], [0.3, 0.7]])]
    entries = [entry("one", 1, seeds), entry("two", 2, seeds[:1])]
    axes = averages_plot(entries, LIGHT).axes[0]
    assert axes.lines[0].get_ydata() == pytest.approx([80, 55])
    assert axes.lines[1].get_ydata() == pytest.approx([90, 60])
    (band,) = axes.collections  # a single seed has none
    heights = band.get_paths()[0].vertices[:, 1]
    assert (min(heights), max(heights)) == pytest.approx((55 - 50**0.5, 80 + 200**0.5))
    maps = [panel.images[0].get_array() for panel in matrices_plot(entries).axes[:2]]
    assert maps[0][1].tolist() == pytest.approx([40, 70])
    assert maps[1][1].tolist() == pytest.approx([50, 70])
    scales = {panel.images[0].get_clim() for panel in matrices_plot(entries).axes[:2]}
    assert scales == {(40, 90)}


def colours(figure: Figure) -> Iterator[str]:
    """The colours of all that is drawn."""
    for artist in figure.findobj():
        for part in ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor"):
            if hasattr(artist, f"get_{part}") and artist.get_visible():
                found = getattr(artist, f"get_{part}")()
                each = found if np.ndim(found) == 2 else [found]
                yield from (to_hex(one) for one in each if to_rgba(one)[3])


def test_dark_plots_have_no_light_colour(tmp_path: Path) -> None:
    made: dict[str, Figure] = {}

    def make(theme: Theme) -> dict[str, Figure]:
        entries = LIKENESSES["far apart"]
        made.update(lines=averages_plot(entries, theme), points=memory_plot(entries, theme))
        return made

    write_figures(make, tmp_path)
    for figure in made.values():
        assert set(colours(figure)) == {*DARK.runs, DARK.text, DARK.muted, DARK.line, DARK.surface}


def test_memory_counts_the_buffer() -> None:
    run = known_run([[0.9]], parameters=100, buffer=900)
    points = memory_plot([entry("one", 1, [run])], LIGHT).axes[0].lines
    assert (points[0].get_xdata()[0], points[0].get_ydata()[0]) == pytest.approx((1000, 90))


def test_labels_have_their_points_colours() -> None:
    entries = [entry(name, number, [known_run([[0.9]])]) for number, name in enumerate("abc", 1)]
    figure = memory_plot(entries, LIGHT)
    points = [line.get_color() for line in figure.axes[0].lines]
    assert {text.get_text(): text.get_color() for text in figure.texts} == dict(
        zip("abc", points, strict=True)
    )


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_all_methods_look_different(theme: Any) -> None:
    count = 21
    assert len(METHODS) <= count
    lines = {(colour(theme, i), line_style(theme, i)) for i in range(count)}
    points = {(marker(i), is_hollow(theme, i)) for i in range(count)}
    assert len(lines) == len(points) == count
    assert len(LIGHT.runs) == len(DARK.runs)


def test_label_near_another_point_has_a_leader_line() -> None:
    entries = many(lambda i: 0.9 + 0.004 * i, lambda i: 300_000)
    figure = memory_plot(entries, LIGHT)
    renderer = FigureCanvasAgg(figure).get_renderer()
    width, height = figure.bbox.size
    axes = figure.axes[0]
    points = [
        tuple(axes.transData.transform((line.get_xdata()[0], line.get_ydata()[0])))
        for line in axes.lines
        if line.get_marker() not in ("None", "", None)
    ]
    assert len(points) == len(entries)
    leaders = (part for part in figure.get_children() if isinstance(part, Line2D))
    starts = [tuple(line.get_xydata()[0] * (width, height)) for line in leaders]

    def away(box: Any, point: Any) -> float:
        (left, bottom, right, top), (x, y) = box.extents, point
        return math.dist(point, (min(max(x, left), right), min(max(y, bottom), top)))

    confused = 0
    for text, own in zip(figure.texts, points, strict=True):
        box = text.get_window_extent(renderer)
        if any(away(box, point) < away(box, own) - 5 for point in points):
            confused += 1
            assert any(math.dist(own, start) < 1 for start in starts)
    assert confused

"""Placement of labels in a plot, so that none covers another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: Box) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.bottom < other.top
            and other.bottom < self.top
        )

    def inside(self, other: Box) -> bool:
        return (
            self.left >= other.left
            and self.right <= other.right
            and self.bottom >= other.bottom
            and self.top <= other.top
        )


def place_labels(
    points: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    frame: Box,
    clear: float,
) -> list[Box]:
    """A box for each point's label, of the given width and height: near it, inside the frame while
    there is room, over no other label and no point, around which `clear` stays free."""
    marks = [Box(x - clear, y - clear, x + clear, y + clear) for x, y in points]
    placed: dict[int, Box] = {}
    # Points with the most others around them come first: they have the least choice.
    near = 4 * max(height for _, height in sizes) if sizes else 0
    crowd = [sum(math.dist(p, q) < near for q in points) for p in points]
    for index in sorted(range(len(points)), key=lambda i: -crowd[i]):
        taken = [*marks, *placed.values()]
        # Outside the frame there is always room, but it is tried last.
        span = math.hypot(frame.right - frame.left, frame.top - frame.bottom)
        placed[index] = next(
            box
            for distance, box in _around(points[index], sizes[index], clear)
            if (box.inside(frame) or distance > span) and not any(map(box.overlaps, taken))
        )
    return [placed[index] for index in range(len(points))]


def _around(
    point: tuple[float, float], size: tuple[float, float], clear: float
) -> Iterator[tuple[float, Box]]:
    """Boxes around a point, ever further from it, with their distances."""
    (x, y), (width, height) = point, size
    step = height / 2
    for ring in itertools.count():
        gap = 1.05 * clear + ring * step
        directions = 8 if ring < 2 else 32
        for turn in range(directions):
            # First to the right, then alternating up and down around a rectangle.
            angle = 2 * math.pi * ((turn + 1) // 2) / directions * (-1 if turn % 2 else 1)
            across, up = math.cos(angle), math.sin(angle)
            edge = max(abs(across), abs(up))
            left = x + across / edge * (gap + width / 2) - width / 2
            bottom = y + up / edge * (gap + height / 2) - height / 2
            yield gap, Box(left, bottom, left + width, bottom + height)


def spread_apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places as near as possible to those wanted, in the same order and at least `gap` apart, from
    `low` to `high` if all of them fit.

    >>> spread_apart([5, 1, 5], gap=2, low=0, high=10)
    [4.0, 1.0, 6.0]
    """
    order = sorted(range(len(wanted)), key=lambda index: (wanted[index], index))
    # With the gaps subtracted, places must only not decrease: those that do are put at their mean.
    groups: list[list[float]] = []
    for rank, index in enumerate(order):
        groups.append([wanted[index] - rank * gap])
        while len(groups) > 1 and _mean(groups[-2]) > _mean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    level = [_mean(group) for group in groups for _ in group]
    last = high - gap * (len(wanted) - 1)
    places = [max(low, min(last, value)) + rank * gap for rank, value in enumerate(level)]
    return [place for _, place in sorted(zip(order, places, strict=True))]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

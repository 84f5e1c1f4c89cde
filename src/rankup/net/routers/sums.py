"""Exact sums of whole-numbered features, which tasks can be added to and taken from in any order
with the same bits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rankup.errors import RankupError

_EXACT = 1024  # rows whose products float32 adds up without rounding: 127² · 1024 < 2²⁴
WHOLE: tuple[torch.dtype, ...] = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Sums:
    """Of some samples: how many there are, and the sum of their features' outer products.

    Attributes:
        gram: `[D, D]`, int64.
        count: samples.
    """

    gram: Tensor
    count: int

    @classmethod
    def of(cls, rows: Iterable[Tensor]) -> Sums:
        """Those of batches of features `[B, D]`, whole numbers from −127 to 127."""
        total: Tensor | None = None
        count = 0
        for batch in rows:
            for chunk in torch.split(batch, _EXACT):
                gram = (chunk.t() @ chunk).to(torch.int64)
                total = gram if total is None else total.add_(gram)
            count += len(batch)
        if total is None:
            raise RankupError("there are no samples to take sums over")
        return cls(total.cpu(), count)

    def __add__(self, other: Sums) -> Sums:
        self._check(other)
        return Sums(self.gram + other.gram, self.count + other.count)

    def __sub__(self, other: Sums) -> Sums:
        self._check(other)
        return Sums(self.gram - other.gram, self.count - other.count)

    def _check(self, other: Sums) -> None:
        if self.gram.shape != other.gram.shape:
            raise RankupError(
                f"a router's sums are over {len(self.gram)} features, these over "
                f"{len(other.gram)}: all tasks need inputs of one shape"
            )

    def packed(self) -> Tensor:
        """The upper triangle, in the narrowest whole numbers that hold it."""
        return narrow(self.gram[tuple(torch.triu_indices(*self.gram.shape))])

    @classmethod
    def unpacked(cls, triangle: Tensor, count: int) -> Sums:
        size = round(((8 * len(triangle) + 1) ** 0.5 - 1) / 2)
        if size * (size + 1) // 2 != len(triangle):
            raise ValueError(f"{len(triangle)} numbers are no triangle of a matrix")
        gram = triangle.new_zeros(size, size, dtype=torch.int64)
        rows, columns = torch.triu_indices(size, size)
        gram[rows, columns] = gram[columns, rows] = triangle.to(torch.int64)
        return cls(gram, count)


def narrow(whole: Tensor) -> Tensor:
    """The same numbers, in the narrowest type of those that sums are stored in."""
    most = int(whole.abs().max()) if whole.numel() else 0
    return whole.to(next(kind for kind in WHOLE if most <= torch.iinfo(kind).max))

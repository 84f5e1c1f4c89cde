"""Checks of the tensors in a method's file before the method loads them: of their names, dtypes,
shapes and values.

A matching hash is not enough, because a file may come from a stranger. Every check raises
`ValueError` with one sentence.
"""

import math
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rankup.layers import Tensors

ANY = range(1 << 62)  # in a shape: any size


@dataclass(frozen=True)
class Layout:
    """The expected layout of a tensor, whose values must be finite.

    Args:
        shape: its sizes, or ranges of allowed ones.
        dtype: its dtype.
        least, most: bounds of its values.
        but: a mask of entries that need not be finite.
        wrong: a further check, which returns what is wrong with the values, or None.
    """

    shape: Sequence[int | range]
    dtype: torch.dtype
    least: float = -math.inf
    most: float = math.inf
    but: Tensor | None = None
    wrong: Callable[[Tensor], str | None] | None = None

    @classmethod
    def like(cls, tensor: Tensor, least: float = -math.inf) -> "Layout":
        """The layout of a tensor. Entries that are infinite now, as in buffers with masks, may be
        so in the file, too."""
        infinite = None if is_finite(tensor) else ~tensor.detach().isfinite()
        return cls(tuple(tensor.shape), tensor.dtype, least, but=infinite)

    def check(self, tensor: Tensor, name: str) -> None:
        """Raise `ValueError` if a tensor does not have this layout.

        Args:
            name: how messages name the tensor.
        """
        if tensor.dtype != self.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, expected {self.dtype}")
        if not self._fits(tensor.shape):
            sizes = [_size(size) for size in self.shape]
            raise ValueError(
                f"{name} is of shape {list(tensor.shape)}, expected [{', '.join(sizes)}]"
            )
        kept = tensor if self.but is None else tensor.masked_fill(self.but.to(tensor.device), 0)
        if not is_finite(kept):
            raise ValueError(f"{name} holds numbers that are not finite")
        if tensor.numel() and (self.least, self.most) != (-math.inf, math.inf):
            lowest, highest = (value.item() for value in tensor.aminmax())
            if lowest < self.least or highest > self.most:
                raise ValueError(
                    f"{name} holds numbers from {lowest} to {highest}, expected "
                    f"{self.least} to {self.most}"
                )
        if self.wrong is not None and (problem := self.wrong(tensor)):
            raise ValueError(f"{name} {problem}")

    def _fits(self, shape: Sequence[int]) -> bool:
        return len(shape) == len(self.shape) and all(
            size in wanted if isinstance(wanted, range) else size == wanted
            for size, wanted in zip(shape, self.shape, strict=True)
        )


Layouts = dict[str, Layout]


@dataclass
class Expected:
    """The tensors that a method expects in its file.

    Args:
        layouts: their layouts, by name.
        free: prefixes of the names of tensors that are only checked to be finite.
    """

    layouts: Layouts = field(default_factory=dict)
    free: list[str] = field(default_factory=list)

    def add(self, start: str, layouts: Layouts | None) -> None:
        """Add tensors whose names have the prefix `start`; None if their layouts are not known."""
        if layouts is None:
            self.free.append(start)
        else:
            self.layouts |= {start + name: layout for name, layout in layouts.items()}

    def check(self, tensors: Tensors) -> None:
        """Raise `ValueError` if a tensor is missing, unexpected or not of its layout."""
        for name in self.layouts:
            if name not in tensors:
                raise ValueError(f"it has no tensor {_short(name)}")
        for name, tensor in tensors.items():
            layout = self.layouts.get(name)
            if layout is not None:
                layout.check(tensor, _short(name))
            elif not name.startswith(tuple(self.free)):
                raise ValueError(f"it has a tensor {_short(name)}, for which there is no place")
            elif not is_finite(tensor):
                raise ValueError(f"{_short(name)} holds numbers that are not finite")


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    wide = tensor if tensor.dtype.itemsize > 1 else tensor.float()  # not for float8
    return bool(wide.isfinite().all())


def _short(name: str) -> str:
    return reprlib.repr(name)


def _size(size: int | range) -> str:
    if not isinstance(size, range):
        return str(size)
    return "any" if size == ANY else f"{size.start} to {size.stop - 1}"

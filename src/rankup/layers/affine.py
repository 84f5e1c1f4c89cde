"""Modules that scale or shift channels by vectors of their own, such as a user's own norm. For a
mixed batch they run once with neutral vectors; their output is then scaled and shifted per sample.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import Literal

import torch
from torch import Tensor, nn

# How a vector v is used: y·v, y·(1 + v) as by a norm whose weight starts at zero, or y + v.
Use = Literal["scale", "one plus", "shift"]

_CLOSE = 1e-4
_NEUTRAL = {"scale": 1.0, "one plus": 0.0, "shift": 0.0}


@dataclass(frozen=True)
class Affine:
    """How a module uses vectors: its output is that with neutral ones, scaled and shifted."""

    uses: tuple[tuple[str, Use], ...]  # by name of the vector
    over_last: bool  # whether along the last dimension, not along the channels, the second one

    def neutral(self, key: str) -> float:
        """The value of a neutral vector's numbers, which change nothing."""
        return _NEUTRAL[dict(self.uses)[key]]

    def apply(self, y: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
        """Scale and shift `y` by rows per sample, `[B, C]` or `[B, 1, C]`, of at least float32."""
        by_use = {use: self._fitted(rows[key], y) for key, use in self.uses}
        scale, shift = by_use.get("scale"), by_use.get("shift")
        if "one plus" in by_use:
            scale = 1 + by_use["one plus"]
        if scale is None or shift is None:
            whole = y * scale if scale is not None else y + shift  # type: ignore[operator]
        else:
            whole = torch.addcmul(shift, y.to(shift.dtype), scale)
        return whole.to(y.dtype)

    def _fitted(self, rows: Tensor, y: Tensor) -> Tensor:
        if self.over_last and y.dim() == rows.dim():
            return rows
        between = (1,) * (y.dim() - 2)
        shape = (*between, rows.shape[-1]) if self.over_last else (rows.shape[-1], *between)
        return rows.view(rows.shape[0], *shape)


def affine_in(module: nn.Module, keys: Sequence[str]) -> Affine | None:
    """How a module uses its vectors of these names, found by trial; None if in another way, or if
    it has other parameters."""
    vectors = [tensor for tensor in module._parameters.values() if tensor is not None]
    width = vectors[0].numel() if vectors else 0
    if (
        len(vectors) != len(keys)
        or not 1 <= len(keys) <= 2
        or any(module._parameters.get(key) is None for key in keys)
        or any(vector.shape != (width,) for vector in vectors)
        or width < 2
        or any(True for child in module.children() for _ in child.parameters())
        or len(inspect.signature(module.forward).parameters) != 1
    ):
        return None
    tried = copy.deepcopy(module).to("cpu", torch.float32)
    return next((way for way in _ways(keys) if _computes(tried, way, width)), None)


def _ways(keys: Sequence[str]) -> Iterator[Affine]:
    scales: tuple[Use, ...] = ("scale", "one plus")
    uses: list[tuple[Use, ...]] = [("scale",), ("one plus",), ("shift",)]
    if len(keys) == 2:
        uses = [order for scale in scales for order in permutations((scale, "shift"))]
    for last, found in product((True, False), uses):
        yield Affine(tuple(zip(keys, found, strict=True)), last)


@torch.no_grad()
def _computes(module: nn.Module, way: Affine, width: int) -> bool:
    """Whether the module does this, in both modes and for inputs of several shapes."""
    places = tuple(size for size in (2, 3, 5) if size != width)[:2]
    last, channels = ((), places[:1], places), (places[:1], places)
    shapes = [(3, *some, width) for some in last] if way.over_last else []
    shapes = shapes or [(3, width, *some) for some in channels]
    draw = torch.Generator().manual_seed(0)
    vectors = {key: module.get_parameter(key) for key, _ in way.uses}
    rows = {key: torch.randn(width, generator=draw) for key in vectors}
    agreed = 0
    for training in (False, True):
        module.train(training)
        for shape in shapes:
            x = torch.randn(shape, generator=draw) + 0.5
            try:
                for key, vector in vectors.items():
                    vector.fill_(way.neutral(key))
                neutral = module.forward(x.clone())
                for key, vector in vectors.items():
                    vector.copy_(rows[key])
                answer = module.forward(x.clone())
            except Exception:  # a module's own code, which may not take inputs of this shape
                continue
            if not isinstance(answer, Tensor) or answer.shape != x.shape:
                return False
            each = {key: row.expand(len(x), width) for key, row in rows.items()}
            if not torch.allclose(answer, way.apply(neutral, each), _CLOSE, _CLOSE):
                return False
            agreed += 1
    return agreed > 0

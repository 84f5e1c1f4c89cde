"""Padding that gives tasks of different rank the same shapes, so that one CUDA graph serves all."""

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from rankup.layers import FactoredLayer, Tensors


class Padding:
    """Pads the tables of frozen factors, and selectors over them, to a multiple of so many rows.

    Rows of zeros change nothing, and their selectors get no gradient.

    Args:
        layers: by the names that they have in the learner.
    """

    def __init__(self, layers: Mapping[str, FactoredLayer], multiple: int) -> None:
        self._layers = layers
        self._missing = {name: -len(layer.old_U) % multiple for name, layer in layers.items()}

    def rows(self, name: str) -> int:
        """How many rows the padded tables of a layer have."""
        return len(self._layers[name].old_U) + self._missing[name]

    def table(self, name: str, table: Tensor) -> Tensor:
        """A layer's padded table; the same tensor if nothing is missing."""
        missing = self._missing[name]
        return F.pad(table, (0, 0, 0, missing)) if missing else table

    def pad(self, tensors: Tensors) -> Tensors:
        """What tasks learn, by name, with selectors as long as padded tables."""
        padded = dict(tensors)
        for name, old, missing in self._selectors(tensors):
            selector = tensors[name].detach()
            padded[name] = torch.cat([F.pad(selector[:old], (0, missing)), selector[old:]])
        return padded

    def unpad(self, tensors: Tensors) -> Tensors:
        """The inverse of `pad`."""
        cut = dict(tensors)
        for name, old, missing in self._selectors(tensors):
            cut[name] = torch.cat([tensors[name][:old], tensors[name][old + missing :]])
        return cut

    def _selectors(self, tensors: Tensors) -> Iterator[tuple[str, int, int]]:
        """The names of padded selectors, where their padding begins and how long it is."""
        for prefix, layer in self._layers.items():
            name, missing = f"{prefix}.new_selector", self._missing[prefix]
            if missing and name in tensors:
                yield name, len(layer.old_U), missing

"""Whether a module has the samples of a batch in the first dimension, wherever it runs a layer."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from rankup import seeds
from rankup.errors import RankupError
from rankup.layers import active

Run = Callable[[Any, dict[str, Any]], Any]  # of inputs and the module's own options


class Audit:
    """Once for every shape of input to a mixed batch, and all else that the module is called with.

    A layer compares the number of its rows with the number of samples. A module that puts another
    dimension first, of the same size by chance, would pass; a batch of one shows it.
    """

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()

    def check(self, x: Any, tasks: Tensor, options: dict[str, Any], run: Run) -> None:
        if len(tasks) < 2:
            return
        if isinstance(x, Tensor) and not options:  # in little time, as it is nearly always so
            if x.shape[1:] not in self._seen:
                _run_first(x[:1], tasks, {}, run)
                self._seen.add(x.shape[1:])
            return
        leaves, form = tree_flatten((x, options))
        parts = [_sample_of(leaf, len(tasks)) for leaf in leaves]
        kinds = [part.shape if isinstance(part, Tensor) else repr(part) for part in parts]
        if (seen := (str(form), *kinds)) in self._seen:
            return
        first, own = tree_unflatten(parts, form)
        try:
            _run_first(first, tasks, own, run)
        except RankupError:
            raise
        except (RuntimeError, ValueError, IndexError):
            # What is as long as the batch by chance, as a mask, cannot be cut: nothing is known.
            pass
        self._seen.add(seen)


def _run_first(x: Any, tasks: Tensor, options: dict[str, Any], run: Run) -> None:
    with seeds.drawing(tasks.device, 0), torch.no_grad(), active(tasks[:1]):
        run(x, options)


def _sample_of(leaf: Any, samples: int) -> Any:
    """The first sample's part of what has one for each, else all of it."""
    each = isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == samples
    return leaf[:1] if each else leaf

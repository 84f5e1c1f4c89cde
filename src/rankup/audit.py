"""Whether a module has the samples of a batch in the first dimension, wherever it runs a layer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from rankup import seeds
from rankup.errors import RankupError
from rankup.layers import active

Run = Callable[[Any, dict[str, Any]], Any]  # of inputs and the module's own options

_MOST = 1000  # kinds of calls that are tried: who has more counts something in an option


class Audit:
    """Once for every shape of input to a mixed batch, and all else that the module is called with.

    A layer compares the number of its rows with the number of samples. A module that puts another
    dimension first, of the same size by chance, would pass; a batch of another size shows it.
    """

    def __init__(self) -> None:
        self._seen: set[Any] = set()

    def check(self, x: Any, tasks: Tensor, options: dict[str, Any], run: Run) -> None:
        if len(tasks) < 2 or len(self._seen) == _MOST:
            return
        if isinstance(x, Tensor) and not options:  # in little time, as it is nearly always so
            if x.shape[1:] not in self._seen:
                _try(_some_of(x, len(tasks)), tasks, {}, run)
                self._seen.add(x.shape[1:])
            return
        leaves, form = tree_flatten((x, options))
        seen = (str(form), *(_kind(leaf, len(tasks)) for leaf in leaves))
        if seen in self._seen:
            return
        if any(_is_per_sample(leaf, len(tasks)) for leaf in leaves):
            some, own = tree_unflatten([_some_of(leaf, len(tasks)) for leaf in leaves], form)
            _try(some, tasks, own, run)
        self._seen.add(seen)


def _try(some: Any, tasks: Tensor, options: dict[str, Any], run: Run) -> None:
    """Run the module on some of the samples. What it cannot run on so few, or on a mask that was
    cut because it is as long as the batch by chance, tells nothing."""
    own = _some_of(tasks, len(tasks))
    try:
        with seeds.drawing(tasks.device, 0), torch.no_grad(), active(own):
            run(some, options)
    except RankupError as error:
        raise RankupError(
            f"tried with {len(own)} samples, before the {len(tasks)} of the mixed batch: {error}"
        ) from error
    except Exception:
        pass


def _some_of(leaf: Any, samples: int) -> Any:
    """The parts of two samples, or of three if there are two, of what has one for each sample; else
    all of it. Never that of one, whose dimension a module may squeeze."""
    if not _is_per_sample(leaf, samples):
        return leaf
    # Copies, because a module may change what it is given.
    return torch.cat([leaf, leaf[:1]]) if samples == 2 else leaf[:2].clone()


def _is_per_sample(leaf: Any, samples: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == samples


def _kind(leaf: Any, samples: int) -> Any:
    """What decides how a module runs: shapes and modes, not numbers that it computes with."""
    if isinstance(leaf, Tensor):
        return leaf.shape[1:] if _is_per_sample(leaf, samples) else leaf.shape
    return leaf if isinstance(leaf, str | int | None) else type(leaf)

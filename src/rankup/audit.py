"""Whether a module has the samples of a batch in the first dimension, wherever it runs a layer, and
leaves each of its logits alone."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from rankup import seeds
from rankup.errors import RankupError
from rankup.layers import active

Run = Callable[[Any, dict[str, Any]], Any]  # of inputs and the module's own options

_MOST = 1000  # kinds of calls that are tried: who has more counts something in an option


class Uneven(NamedTuple):
    """A task with few classes and one with more, by their indices."""

    narrow: int
    wide: int
    classes: int  # of the narrow one


class Audit:
    """Once for every shape of input to a mixed batch, and all else that the module is called with.

    A layer compares the number of its rows with the number of samples. A module that puts another
    dimension first, of the same size by chance, would pass; a batch of another size shows it. A
    sample of a task with fewer classes than another has logits of −∞ beside its own: a module that
    computes with all of them answers otherwise than for one task.
    """

    def __init__(self) -> None:
        self._seen: set[Any] = set()

    def check(
        self, x: Any, tasks: Tensor, options: dict[str, Any], run: Run, uneven: Uneven | None = None
    ) -> None:
        if len(tasks) < 2 or len(self._seen) == _MOST:
            return
        if isinstance(x, Tensor) and not options:  # in little time, as it is nearly always so
            seen: Any = x.shape[1:], uneven
            if seen not in self._seen:
                _try(_some_of(x, len(tasks)), tasks, {}, run, uneven)
                self._seen.add(seen)
            return
        leaves, form = tree_flatten((x, options))
        seen = (str(form), uneven, *(_kind(leaf, len(tasks)) for leaf in leaves))
        if seen in self._seen:
            return
        if any(_is_per_sample(leaf, len(tasks)) for leaf in leaves):
            some, own = tree_unflatten([_some_of(leaf, len(tasks)) for leaf in leaves], form)
            _try(some, tasks, own, run, uneven)
        self._seen.add(seen)


def _try(
    some: Any, tasks: Tensor, options: dict[str, Any], run: Run, uneven: Uneven | None
) -> None:
    """Run the module on some of the samples. What it cannot run on so few, or on a mask that was
    cut because it is as long as the batch by chance, tells nothing."""
    own = _some_of(tasks, len(tasks))
    try:
        with seeds.drawing(tasks.device, 0), torch.no_grad():
            with active(own):
                run(some, options)
            if uneven is not None:
                _compare(some, len(own), tasks.device, options, run, uneven)
    except RankupError as error:
        raise RankupError(
            f"tried with {len(own)} samples, before the {len(tasks)} of the mixed batch: {error}"
        ) from error
    except Exception:
        pass


def _compare(
    some: Any, samples: int, device: torch.device, options: dict[str, Any], run: Run, of: Uneven
) -> None:
    """Refuse a module that answers otherwise for a task beside one with more classes."""
    mixed = torch.full((samples,), of.narrow, device=device)
    mixed[-1] = of.wide
    found = []
    for task in (mixed, of.narrow):
        with active(task):
            found.append(run(_copy_of(some), options))
    beside, alone = found
    if not all(isinstance(y, Tensor) and y.dim() == 2 and len(y) == samples for y in found):
        return
    one, other = beside[:-1, : of.classes].float(), alone[:-1, : of.classes].float()
    # They are computed in two ways, which differ by rounding.
    far = 0.05 * float(other.abs().amax()) + 1e-6
    if one.shape == other.shape and not torch.allclose(one, other, rtol=0.0, atol=far):
        raise RankupError(
            "the module computes across its logits, of which tasks have different numbers: run "
            "each task by itself"
        )


def _copy_of(some: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, some)


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

"""Checks that a module keeps samples in the first dimension wherever it runs a layer, and does not
compute across its logits."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from rankup import seeds
from rankup.errors import RankupError
from rankup.layers import active

Run = Callable[[Any, dict[str, Any]], Any]  # takes inputs and the module's own options

_MOST = 1000  # kinds of calls that are tried: with more, some option must be a counter


class Uneven(NamedTuple):
    """A task with few classes and one with more, by their indices."""

    narrow: int
    wide: int
    classes: int  # of the narrow one


class Audit:
    """Tries a module once for every shape of mixed batch and kind of options it is called with.

    A layer compares its number of rows with the number of samples. A module that puts another
    dimension first, of the same size by chance, would pass; a batch of another size reveals it. A
    sample of a task with fewer classes than another has logits of −∞ beside its own: a module that
    computes across all of them answers differently than for that task alone.
    """

    def __init__(self) -> None:
        self._seen: set[Any] = set()

    def check(
        self, x: Any, tasks: Tensor, options: dict[str, Any], run: Run, uneven: Uneven | None = None
    ) -> None:
        if len(tasks) < 2 or len(self._seen) == _MOST:
            return
        if isinstance(x, Tensor) and not options:  # the usual case, kept fast
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
    """Run the module on some of the samples. Other errors tell nothing: it may be unable to run
    on so few, or on a mask that was cut because it happened to be as long as the batch."""
    own = _some_of(tasks, len(tasks))
    try:
        with seeds.drawing(tasks.device, 0), torch.no_grad():
            with active(own):
                run(some, options)
            if uneven is not None:
                _compare(some, len(own), tasks.device, options, run, uneven)
    except RankupError as error:
        raise RankupError(
            f"in a trial run with {len(own)} samples, before the {len(tasks)} of the mixed batch: "
            f"{error}"
        ) from error
    except Exception:
        pass


def _compare(
    some: Any, samples: int, device: torch.device, options: dict[str, Any], run: Run, of: Uneven
) -> None:
    """Refuse a module whose answers for a task change beside one with more classes."""
    mixed = torch.full((samples,), of.narrow, device=device)
    mixed[-1] = of.wide
    found = []
    for task in (mixed, of.narrow):
        with active(task):
            found.append(run(_copy_of(some), options))
    beside, alone = (tree_flatten(y)[0] for y in found)
    for one, other in zip(beside, alone, strict=False):
        pair = one, other
        if all(_is_per_sample(y, samples) and y.is_floating_point() for y in pair):
            _refuse_across(one[:-1].float(), other[:-1].float(), of.classes)


def _refuse_across(beside: Tensor, alone: Tensor, classes: int) -> None:
    """Refuse answers that differ beside a task with more classes from those for the task alone, or
    that may be a class which the task does not have."""
    is_wider = beside.dim() > 1 and beside.shape[-1] > alone.shape[-1] == classes
    own = beside[..., :classes] if is_wider else beside
    if own.shape != alone.shape or bool(alone.isnan().any()):
        return
    # They are computed in two ways, so they differ by rounding.
    far = 0.05 * float(torch.where(alone.isfinite(), alone.abs(), 0).max())
    is_other = not torch.allclose(own, alone, rtol=0.0, atol=far + 1e-6)
    is_missing = is_wider and not bool((beside[..., classes:] <= own.amin(-1, keepdim=True)).all())
    if is_other or is_missing:
        raise RankupError(
            "the module computes across its logits or negates them, and tasks have different "
            "numbers of logits: run each task by itself"
        )


def _copy_of(some: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, some)


def _some_of(leaf: Any, samples: int) -> Any:
    """Two samples, or three if the batch has two, of a tensor with an entry per sample; any other
    leaf as it is. Never one sample, whose dimension a module may squeeze."""
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

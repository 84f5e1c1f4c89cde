"""Mixed batches for one task after another: arguments are split by task, and outputs are joined."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from rankup.errors import RankupError
from rankup.layers.task_context import active, as_wide_as_widest

Run = Callable[[Any, dict[str, Any]], Any]  # takes inputs and the module's own options
Split = Mapping[str, int | None]  # the dimension along which an argument is split, None for none


class Arguments:
    """The arguments of a module's call, which can be split by samples.

    A tensor is split along its first dimension if that is as long as the batch, unless `split` says
    otherwise for the argument that it is in.

    Args:
        x: the first argument.
        options: the others, by name. Arguments may be nested, as torch's pytrees.
        samples: how many samples the batch has.
    """

    def __init__(self, x: Any, options: dict[str, Any], samples: int, split: Split) -> None:
        self.samples = samples
        for name in split:
            if name not in options:
                raise RankupError(f"split names {name!r}, which is none of the arguments given")
        self.leaves, self.form = tree_flatten((x, options))
        named = [(None, x), *options.items()]
        owners = [name for name, value in named for _ in tree_flatten(value)[0]]
        self.dims = [
            self._dim(leaf, split.get(name, 0) if name else 0)
            for name, leaf in zip(owners, self.leaves, strict=True)
        ]

    @property
    def can_be_split(self) -> bool:
        return any(dim is not None for dim in self.dims)

    def of(self, rows: Tensor) -> tuple[Any, dict[str, Any]]:
        """The arguments for some of the samples."""
        leaves = [
            leaf if dim is None else leaf.index_select(dim, rows.to(leaf.device))
            for leaf, dim in zip(self.leaves, self.dims, strict=True)
        ]
        return tree_unflatten(leaves, self.form)  # type: ignore[no-any-return]

    def kind(self) -> Any:
        """The shapes and options that may decide how a module runs, without the number of samples
        and the values of tensors and floats."""
        kinds = (_kind(leaf, dim) for leaf, dim in zip(self.leaves, self.dims, strict=True))
        return str(self.form), *kinds

    def _dim(self, leaf: Any, dim: int | None) -> int | None:
        if not isinstance(leaf, Tensor) or dim is None:
            return None
        fits = -leaf.dim() <= dim < leaf.dim() and leaf.shape[dim] == self.samples
        return dim if fits else None


def _kind(leaf: Any, dim: int | None) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(size for at, size in enumerate(leaf.shape) if dim is None or at != dim)
    return leaf if isinstance(leaf, str | int | None) else type(leaf)


def run_by_groups(given: Arguments, tasks: Tensor, run: Run) -> Any:
    """Run the module on the samples of each task, and join the outputs in the batch's order."""
    if not given.can_be_split:
        raise RankupError(
            "this module takes a mixed batch task by task, but none of its arguments is a tensor "
            f"whose first dimension has the length of the batch, {given.samples}: name the "
            "dimension, as in net(…, split={'mask': 1})"
        )
    found = sorted({*tasks.tolist()}) or [0]  # an empty batch is any task's
    places = [(tasks == task).nonzero()[:, 0] for task in found]
    answers = []
    for task, rows in zip(found, places, strict=True):
        with active(task), as_wide_as_widest():
            answers.append(run(*given.of(rows)))
    order = torch.cat(places).argsort()

    def join(name: str, parts: Sequence[Any]) -> Any:
        is_rows = all(
            isinstance(part, Tensor) and part.dim() and len(part) == len(rows)
            for part, rows in zip(parts, places, strict=True)
        )
        if is_rows and len({part.shape[1:-1] for part in parts}) == 1:
            return torch.cat(_as_wide_as_widest(parts))[order]
        return _common(name, parts)

    return _joined(answers, join)


def _as_wide_as_widest(parts: Sequence[Tensor]) -> list[Tensor]:
    """Logits padded with −inf to those of the task with the most classes."""
    if len({part.shape for part in parts}) == 1 or parts[0].dim() < 2:
        return list(parts)
    widest = max(part.shape[-1] for part in parts)
    return [F.pad(part, (0, widest - part.shape[-1]), value=-math.inf) for part in parts]


def run_every_task(given: Arguments, tasks: Tensor, known: int, run: Run) -> Any:
    """Run the module on the whole batch for every task, and pick each sample's output. This does
    not read the values of `tasks`, as is needed for compiling and exporting."""
    x, options = tree_unflatten(given.leaves, given.form)
    answers = []
    for task in range(known):
        with active(task), as_wide_as_widest():
            answers.append(run(x, options))
    rows = torch.arange(tasks.shape[0], device=tasks.device)

    def join(name: str, parts: Sequence[Any]) -> Any:
        if all(isinstance(part, Tensor) and part.dim() for part in parts):
            return torch.stack(list(parts))[tasks, rows]
        return _common(name, parts)

    return _joined(answers, join)


def _joined(answers: Sequence[Any], join: Callable[[str, Sequence[Any]], Any]) -> Any:
    flat = [tree_flatten(answer) for answer in answers]
    form = flat[0][1]
    return tree_unflatten(
        [
            join(f"part {at}" if len(flat[0][0]) > 1 else "answer", parts)
            for at, parts in enumerate(zip(*(leaves for leaves, _ in flat), strict=True))
        ],
        form,
    )


def _common(name: str, parts: Sequence[Any]) -> Any:
    """The part of the output that is equal for all groups; a `NotJoined` if there is none."""
    first = parts[0]
    if isinstance(first, str | int | float | None) and all(part == first for part in parts):
        return first
    return NotJoined(name, first)


class NotJoined:
    """In place of a part of the output that belongs to a whole batch, such as a loss or a cache for
    generation, and cannot be joined from those of several tasks. Using it raises an error that says
    so."""

    def __init__(self, name: str, of: Any) -> None:
        vars(self)["says"] = (
            f"{name} of the module's output, a {type(of).__name__}, does not have a row per "
            "sample and cannot be joined from those of several tasks: call the network for one "
            "task at a time, or compute it from the logits"
        )

    def __repr__(self) -> str:
        return f"NotJoined({vars(self)['says']!r})"

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RankupError(vars(self)["says"])

    __getattr__ = __getitem__ = __iter__ = __len__ = __float__ = __bool__ = __call__ = _refuse
    __add__ = __mul__ = __truediv__ = __sub__ = __radd__ = __rmul__ = _refuse

"""A router's examples of a task that was learned in the user's own loop: the inputs given to
`commit_task`, labelled with the network's own answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rankup.errors import TaskStateError
from rankup.net import validate
from rankup.net.routers.base import Examples, run_for

if TYPE_CHECKING:
    from rankup.net.network import IncrementalNet


def kept_for_router(batches: Iterable[Any] | None) -> Sequence[Any]:
    """The batches as a list, because routers iterate over them several times."""
    if batches is None or isinstance(batches, Tensor | str):
        raise TaskStateError(
            "the network's router keeps what it needs of the task's data: call "
            "commit_task(calibrate=batches) with an iterable of input tensors"
        )
    kept = list(batches)
    if not kept:
        raise TaskStateError("calibrate yielded no batch for the network's router to see")
    return kept


def answered_examples(net: IncrementalNet, task: int, batches: Iterable[Any] | None) -> Examples:
    """Examples made of plain inputs, all of which serve as training and as held-out samples."""

    def answered() -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
        for batch in batches or ():
            x, options = validate.batch(batch)
            if not isinstance(x, Tensor):
                raise TaskStateError(
                    f"a router sees inputs that are tensors, got {type(x).__name__}"
                )
            x = x.to(net.device)
            with torch.no_grad():
                y = run_for(net, x, task, options).logits.argmax(1)
            yield x, y, options

    return Examples(answered, answered)

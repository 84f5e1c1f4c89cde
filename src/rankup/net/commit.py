"""Committing a task: what it has learned is rounded, calibrated, checked and made constant."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rankup.data.transforms import all_turns
from rankup.errors import TaskStateError
from rankup.layers import TaskLayer, TaskNorm, Tensors, pooled_statistics, pruned, rounding
from rankup.layers.spec import HeadSpec, Spec, tensor_name
from rankup.net import validate
from rankup.net.mixed import MISSING
from rankup.net.moving import drop
from rankup.net.routers.base import Examples
from rankup.net.routers.by_hand import answered_examples, kept_for_router
from rankup.net.routers.routing import Routing
from rankup.net.shared import SharedTensors
from rankup.net.stages import append
from rankup.net.tasks import KnownTask
from rankup.utils.signals import undisturbed
from rankup.utils.torch_modes import evaluating

if TYPE_CHECKING:
    from rankup.net.network import IncrementalNet


_NOT_AVERAGED = (
    "each has learned by gradients or an optimiser of its own; call net.distribute() before the "
    "first task, begin each task in all processes, and use the same optimiser and rates"
)


def commit(
    net: "IncrementalNet",
    task: KnownTask,
    batches: Iterable[Any] | None,
    examples: Examples | None = None,
) -> None:
    """Make all that a task has learned constant, or raise and leave the task as it is. In a process
    group, all processes must have learned the same bits.

    Args:
        batches: inputs over which batch norms pool their statistics.
        examples: from which a router learns; by default `batches`, with the network's answers.
    """
    if net.routing is not None and examples is None:
        batches = kept_for_router(batches)
    if net.ranks is not None:
        net.ranks.refuse_different(dict(net.named_parameters()), _NOT_AVERAGED)
    with _rounded(net):
        with _calibrated(net, batches, task):
            learned = [part.learned() for part in net.parts]
        task = replace(task, rotations=False)
        pairs = [
            (part, _of_views(part.spec, tensors, task))
            for part, tensors in zip(net.parts, learned, strict=True)
        ]
        place = net._tasks.place(task, len(net.tasks))
        for part, tensors in pairs:
            validate.learned(part.spec, tensors, place, task)
        _refuse_not_finite(net, pairs)
        added = [rounding.rounded(part.spec, tensors, net.options.store) for part, tensors in pairs]
        task = replace(task, kept=_kept(net, added))
        append(net, [task], [[tensors] for tensors in added])
    if net.routing is not None:
        examples = examples or answered_examples(net, len(net.tasks) - 1, batches)
        _learn_routing(net, net.routing, examples)


def _kept(net: "IncrementalNet", added: Sequence[Tensors]) -> dict[str, pruned.Kept]:
    """How many numbers a task keeps of each part of which it may drop some."""
    specs = (part.spec for part in net.parts)
    return {
        spec.name: pruned.count(pruned.masks_of(spec, own))
        for spec, own in zip(specs, added, strict=True)
        if pruned.keys_of(spec)
    }


def _learn_routing(net: "IncrementalNet", routing: Routing, examples: Examples) -> None:
    """Let routers learn the task that was just committed. If they fail, remove it again: it would
    never be guessed."""
    try:
        with evaluating(net), torch.no_grad():
            net.routing = routing.learned(net, examples)
    except BaseException:
        with undisturbed():
            drop(net, len(net.tasks) - 1)
        raise


@contextmanager
def _rounded(net: "IncrementalNet") -> Iterator[None]:
    """Inside, parameters are rounded as they will be stored, so that batch norms pool statistics
    for these. If the commit fails, they are restored."""
    form, before = net.options.store, list[tuple[nn.Parameter, Tensor]]()
    layers = net.layers if form != "full" else []
    _refuse_not_finite(net, [(layer, layer.learned()) for layer in layers])
    try:
        for layer in layers:
            for key, value in rounding.rounded(layer.spec, layer.learned(), form).items():
                parameter = layer.get_parameter(f"new_{key}")
                before.append((parameter, parameter.detach().clone()))
                parameter.data.copy_(value)
        yield
    except BaseException:
        for parameter, value in before:
            parameter.data.copy_(value)
        raise


def _of_views(spec: Spec, learned: Tensors, task: KnownTask) -> Tensors:
    """A part's tensors without the rows of heads that answer for turned images and are no longer
    needed."""
    if not isinstance(spec, HeadSpec):
        return learned
    return {key: tensor[: task.rows] for key, tensor in learned.items()}


def _calibrated(
    net: "IncrementalNet", batches: Iterable[Any] | None, task: KnownTask
) -> AbstractContextManager[None]:
    """Inside, batch norms hold statistics of the task's data: of images in all four turns if it was
    learned from these."""
    norms = [norm for norm in net.layers if isinstance(norm, TaskNorm) and norm.wants_statistics]
    if norms and (isinstance(batches, Tensor | str) or not isinstance(batches, Iterable)):
        raise TaskStateError(
            f"the network has batch norms ({norms[0].spec.name}, …) and takes their statistics "
            "from the task's data: call commit_task(calibrate=batches) with an iterable of input "
            "tensors"
        )

    def run(batch: Any) -> None:
        x, options = validate.batch(batch)
        if task.rotations:
            validate.inputs(x, net.dtype, options)
            net._run_for(len(net.tasks), all_turns(x), options)
            return
        inputs = () if x is MISSING else (x,)
        net(*inputs, task=len(net.tasks), **options)

    return pooled_statistics(net, norms, () if batches is None else batches, run, net.ranks)


def _refuse_not_finite(
    net: "IncrementalNet", learned: Sequence[tuple[TaskLayer | SharedTensors, Tensors]]
) -> None:
    for part, tensors in learned:
        as_given = part.unchanged() if isinstance(part, SharedTensors) else ()
        for key, tensor in tensors.items():
            if key not in as_given and not bool(torch.isfinite(tensor).all()):
                raise TaskStateError(
                    f"task {net.learning!r} cannot be committed: {tensor_name(part.spec, key)} "
                    "holds values that are not finite; abandon_task drops the task"
                )

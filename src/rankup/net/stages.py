"""Beginning and appending tasks, in all parts of a network at once."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rankup.distributed.gradients import average_gradients
from rankup.layers import Start, TaskNorm, Tensors
from rankup.net.routers.routing import Routing
from rankup.net.tasks import KnownTask
from rankup.utils.signals import undisturbed

if TYPE_CHECKING:
    from rankup.net.network import IncrementalNet


def begin(net: "IncrementalNet", task: KnownTask, start: Start) -> None:
    """Begin a task in all parts of a network, or in none if one fails."""
    values = [part.start(task.rows, start) for part in net.parts]
    try:
        for part, tensors in zip(net.parts, values, strict=True):
            part.open(tensors, start)
        net._tasks.learning = task
        for norm in (layer for layer in net.layers if isinstance(layer, TaskNorm)):
            norm.ranks = net.ranks
        if net.ranks is not None:
            average_gradients(net.named_parameters(), net.ranks)
    except BaseException:
        for part in net.parts:
            part.close()
        raise


def append(
    net: "IncrementalNet",
    tasks: Sequence[KnownTask],
    added: Sequence[Sequence[Tensors]],
    routing: Routing | None = None,
) -> None:
    """Add tasks to a network as committed: the one just learned, or those of a file or of another
    network.

    Args:
        added: for each part of the network, the tensors of each task.
        routing: the network's routing from then on; by default it stays as it is.
    """
    # First everything that allocates memory and may fail, then everything that cannot.
    selections = net._tasks.selections(tasks)
    extended = [
        part.extended(*new, selections=selections)
        for part, new in zip(net.parts, added, strict=True)
    ]
    with undisturbed():
        for part, tables in zip(net.parts, extended, strict=True):
            part.close()
            part.install(tables, selections)
        for task in tasks:
            net._tasks.append(task)
        net.routing = routing or net.routing
        net._shared.hold_modes()

"""Removing tasks from a network, and taking over those of another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rankup.errors import RankupError, TaskStateError
from rankup.layers import Tensors
from rankup.layers.spec import Spec, trained_with_first
from rankup.net.stages import append
from rankup.net.tasks import TaskList
from rankup.utils.signals import undisturbed

if TYPE_CHECKING:
    from rankup.growing.options import GrowOptions
    from rankup.net.network import IncrementalNet
    from rankup.net.routers.routing import Routing


def remove(net: IncrementalNet, task: int) -> None:
    """Remove a committed task, or raise and leave the network as it is."""
    _refuse_while_learning(net, "remove_task")
    refuse_removal(net.options, net.plan.specs, net._tasks, task)
    routing = None if net.routing is None else net.routing.without(task)
    drop(net, task, routing)


def drop(net: IncrementalNet, task: int, routing: Routing | None = None) -> None:
    """Remove a committed task from whose factors no other selects, without checking that.

    Args:
        routing: the network's routing from then on; by default it stays as it is.
    """
    name = net.tasks[task]
    tables = [part.without(task) for part in net.parts]
    with undisturbed():
        for part, left in zip(net.parts, tables, strict=True):
            part.drop(task, left)
        net._tasks.remove(task)
        net.routing = routing or net.routing
        net.forget_file(name)


def refuse_removal(
    options: GrowOptions, specs: Sequence[Spec], known: TaskList, index: int
) -> None:
    """Raise if other tasks need the task at an index."""
    task = known.tasks[index]
    place = known.place(task, index)
    adds_factors = any("U" in spec.shapes(place, task.classes) for spec in specs)
    why = ""
    if adds_factors and (users := known.users(index)):
        why = f"{_listed(users)} selects from its factors, and has to go first or with it"
    elif index == 0 and (shared := trained_with_first(specs)):
        why = f"{shared!r} was trained with it and serves all tasks"
    elif options.draws == "number" and index < len(known.tasks) - 1:
        why = "in a network of the first format version only the last task can be"
    if why:
        raise TaskStateError(f"task {task.name!r} cannot be removed: {why}")


def join(net: IncrementalNet, other: IncrementalNet) -> None:
    """Append the tasks of another network, or raise and leave the network as it is."""
    _refuse_while_learning(net, "join")
    _refuse_while_learning(other, "join")
    _refuse_grown_otherwise(net, other)
    new: list[int] = []
    for index, name in enumerate(other.tasks):
        if name not in net.tasks:
            new.append(index)
        elif not _is_same_task(net, net.tasks.index(name), other, index):
            raise RankupError(f"the networks know different tasks of the name {name!r}")
    shared = trained_with_first(net.plan.specs)
    if shared and net.tasks and new and other.tasks[0] != net.tasks[0]:
        raise RankupError(
            f"the networks cannot be joined: {shared!r} was trained with the first task of each, "
            "and these differ"
        )
    tasks = [other._tasks.explicit(index) for index in new]
    added = [[moved(part.added(index), net.device) for index in new] for part in other.parts]
    if tasks:
        routing = net.routing and other.routing and net.routing.joined(other.routing, new)
        append(net, net._tasks.following(tasks), added, routing)
    net.notes = {name: other.notes[name] for name in other.notes} | net.notes


def _refuse_while_learning(net: IncrementalNet, what: str) -> None:
    if net.learning is not None:
        raise TaskStateError(
            f"{what} needs a network between two tasks, but {net.learning!r} is being learned"
        )


def _refuse_grown_otherwise(net: IncrementalNet, other: IncrementalNet) -> None:
    if "number" in (net.options.draws, other.options.draws):
        raise RankupError("networks of the first format version cannot be joined")
    for what, mine, theirs in (
        ("options", net.options, other.options),
        ("layers", net.plan.specs, other.plan.specs),
        ("dtype", net.dtype, other.dtype),
    ):
        if mine != theirs:
            raise RankupError(f"only networks that were grown alike can be joined: {what} differ")
    for part, same in zip(net.parts, other.parts, strict=True):
        if not _equal(part.base(), same.base()):
            raise RankupError(
                "only networks that were grown alike can be joined: the kept weights of "
                f"{part.spec.name!r} differ"
            )


def moved(tensors: Tensors, device: torch.device) -> Tensors:
    """Tensors on a device."""
    return {key: tensor.to(device) for key, tensor in tensors.items()}


def _is_same_task(net: IncrementalNet, index: int, other: IncrementalNet, theirs: int) -> bool:
    mine = net._tasks.tasks[index].classes, net._tasks.uses(index)
    if mine != (other._tasks.tasks[theirs].classes, other._tasks.uses(theirs)):
        return False
    pairs = zip(net.parts, other.parts, strict=True)
    return all(_equal(part.added(index), same.added(theirs)) for part, same in pairs)


def _equal(mine: Tensors, theirs: Tensors) -> bool:
    """Whether tensors are equal to the bit, on whichever devices they are."""
    return mine.keys() == theirs.keys() and all(
        torch.equal(tensor, theirs[key].to(tensor.device)) for key, tensor in mine.items()
    )


def _listed(names: list[str]) -> str:
    first = repr(names[0])
    return first if len(names) == 1 else f"{first}, and {len(names) - 1} more,"

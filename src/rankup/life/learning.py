"""Teaching a network a task: read, learn, test, commit, describe."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from rankup.data.inputs import Input
from rankup.data.tasks import Task
from rankup.life.samples import Found, read_task
from rankup.net.network import IncrementalNet
from rankup.net.tasks import Uses
from rankup.training.checkpoint import Checkpoint
from rankup.training.fit import accuracy, default_recipe, fit
from rankup.training.logs import Log
from rankup.training.loop import Epoch
from rankup.training.recipe import Recipe

_LEAST = 8  # samples in a batch, whose statistics norms take
_STEPS = 700  # that a network needs at least which keeps no pretrained module


@dataclass(frozen=True)
class Progress:
    """How far learning is."""

    stage: Literal["reading", "learning"]
    done: int  # samples or epochs
    total: int
    loss: float | None = None


Tell = Callable[[Progress], None]


@dataclass(frozen=True)
class Learned:
    """How well a task was learned, and what was left out of it."""

    accuracy: float  # on what was held out
    epochs: int
    broken: tuple[str, ...]  # what is wrong with images that cannot be read


def learn(
    net: IncrementalNet,
    name: str,
    found: Found,
    inputs: Input,
    *,
    uses: Uses = "all",
    title: str = "",
    tell: Tell,
    log: Log | None = None,
    recipe_options: Mapping[str, Any],
) -> Learned:
    """Learn a task from what was found and note what is known of it; the network is yet to be
    saved.

    Args:
        inputs: how its inputs are prepared, which may differ from the network's.
        title: a name for people. It is noted also if it is empty, and with it when the task was
            saved and by which versions.
        recipe_options: fields of the default recipe that are to be other.
    """
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        tell(Progress("reading", done, len(found)))

    task, broken = read_task(name, found, inputs, advance)
    recipe = replace(_recipe(net, task), **recipe_options)

    def on_epoch(now: Epoch, checkpoint: Checkpoint) -> None:
        tell(Progress("learning", now.number, now.epochs, now.loss))
        if log is not None:
            log(now, checkpoint)

    tell(Progress("learning", 0, recipe.epochs))
    fit(net, task, recipe, uses=uses, on_epoch=on_epoch)
    tested = accuracy(net, task, recipe)
    if log is not None:
        log.scalars({f"accuracy/{name}": tested}, recipe.epochs)
    own = {} if inputs == net.inputs else {"inputs": inputs}
    net.annotate(name, accuracy=tested, title=title, **own)
    return Learned(tested, recipe.epochs, broken)


def _recipe(net: IncrementalNet, task: Task) -> Recipe:
    """The default recipe, but with at least five steps an epoch if samples are few; and, unless a
    pretrained module is kept, with so many epochs that few photographs are learned at all."""
    recipe, samples = default_recipe(net, task), len(task.train_y)
    recipe = replace(recipe, batch=min(recipe.batch, max(_LEAST, samples // 5)))
    if net.options.base == "keep":
        return recipe
    steps = math.ceil(samples / recipe.batch)
    return replace(recipe, epochs=max(recipe.epochs, math.ceil(_STEPS / steps)))

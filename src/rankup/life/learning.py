"""Teaching a network a task: reading its samples, learning, testing and noting its description."""

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

_SMALLEST_BATCH = 8  # samples; norms compute statistics of batches
_FEWEST_STEPS = 700  # that a network needs unless it keeps a pretrained module


@dataclass(frozen=True)
class Progress:
    """The progress of teaching a task.

    Attributes:
        stage: what is going on.
        done: how many samples are read, or epochs are done.
        total: how many there are.
        loss: the loss of the last epoch.
    """

    stage: Literal["reading", "learning"]
    done: int
    total: int
    loss: float | None = None


Tell = Callable[[Progress], None]


@dataclass(frozen=True)
class Learned:
    """How well a task was learned.

    Attributes:
        accuracy: on held-out samples.
        epochs: how many it took.
        broken: a sentence for each image that could not be read and was left out.
    """

    accuracy: float
    epochs: int
    broken: tuple[str, ...]


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
    """Teach a network a task and note its description. The network is not saved yet.

    Args:
        name: the task's name.
        found: the samples.
        inputs: how its inputs are prepared, which may differ from the network's.
        uses: the tasks from whose factors it selects.
        title: a name for people. It is noted even if it is empty, together with the time and the
            versions with which the task was saved.
        tell: called with the progress.
        log: where curves are drawn.
        recipe_options: fields of the recipe that differ from the default.
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
    """The default recipe, adapted to few samples: with batches small enough for five steps per
    epoch and, unless a pretrained module is kept, more epochs."""
    recipe, samples = default_recipe(net, task), len(task.train_y)
    recipe = replace(recipe, batch=min(recipe.batch, max(_SMALLEST_BATCH, samples // 5)))
    if net.options.base == "keep":
        return recipe
    steps = math.ceil(samples / recipe.batch)
    return replace(recipe, epochs=max(recipe.epochs, math.ceil(_FEWEST_STEPS / steps)))

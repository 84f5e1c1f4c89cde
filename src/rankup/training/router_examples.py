"""What a network's router sees of a task: its training data, of which a part is held out from
learning, so that scores can be centred and scaled by samples that the task was not fitted to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rankup import seeds
from rankup.errors import RankupError
from rankup.net.network import IncrementalNet
from rankup.net.routers.base import Examples
from rankup.net.routers.patches import refuse_no_images
from rankup.training.batches import Feed
from rankup.training.memory_format import for_answers
from rankup.training.recipe import Recipe

if TYPE_CHECKING:
    from rankup.data.tasks import Task

_SHARE = 0.05
_MOST = 1_000  # samples held out
_LEAST = 10  # samples of a task that can spare any


def divided(task: Task, recipe: Recipe, net: IncrementalNet) -> tuple[Task, Examples]:
    """A task without the samples that are held out for the router, and the router's examples."""
    count = len(task.train_y)
    if count < _LEAST:
        raise RankupError(
            f"task {task.name!r} has {count} training samples, but a network with a router holds "
            f"some of them out and needs at least {_LEAST}"
        )
    if net.options.router is not None and net.options.router.patches:
        refuse_no_images(task.train_x)  # before anything is learned
    held = min(_MOST, max(2, round(_SHARE * count)))
    drawn = seeds.generator(net.options.seed, "held out for the router", task.name)
    order = torch.randperm(count, generator=drawn, device="cpu").to(task.train_y.device)
    (out_x, out_y), (x, y) = (
        (task.train_x[rows], task.train_y[rows]) for rows in (order[:held], order[held:])
    )
    kept = replace(task, train_x=x, train_y=y)
    # As test data, which need not be of several classes.
    apart = replace(kept, test_x=out_x, test_y=out_y)
    batches = (partial(_batches, apart, recipe, net, part) for part in ("train", "held out"))
    return kept, Examples(*batches)


def _batches(
    task: Task, recipe: Recipe, net: IncrementalNet, part: str
) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
    feed = Feed(task, replace(recipe, flip=False, crop=0), net.device, net.dtype)
    for x, y in feed.train(len(feed)) if part == "train" else feed.test():
        yield for_answers(net.body, x), y, {}

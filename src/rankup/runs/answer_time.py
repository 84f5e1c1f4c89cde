"""Measuring how long a learned run takes to answer a batch."""

import time

import torch

from rankup.runs.seed_run import SeedRun
from rankup.seeds import generator
from rankup.training.batches import Feed

BATCH = 256
_REPEATS = 30


@torch.no_grad()
def answer_milliseconds(run: SeedRun) -> float:
    """The time to compute a batch's logits for the last task on the run's device, in milliseconds:
    the shortest of several, because others may share the device."""
    device, task = torch.device(run.config.device), run.method.learned - 1
    drawn = generator(0, "answer time")
    feed = Feed(run.stream[task], run.setting.recipe, device)
    some = next(feed.sample(BATCH, drawn))
    x = some[torch.arange(BATCH, device=device) % len(some)]  # repeated if there are too few
    return 1000 * min(_seconds(run, x, task) for _ in range(_REPEATS))


def _seconds(run: SeedRun, x: torch.Tensor, task: int) -> float:
    _wait_for(x.device)
    begun = time.perf_counter()
    run.method.predict(x, task)
    _wait_for(x.device)
    return time.perf_counter() - begun


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

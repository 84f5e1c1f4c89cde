"""ResNet18 on the CPU, an epoch and answers for all its images: ours, ours without each of its
optimisations, and a dense network of the same width in a plain loop. Every measurement is a process
of its own, because how memory is returned is set for a whole process; they take turns. Medians over
repeats.

    python benchmarks/convolutions.py   # a table, and a dated JSON in benchmarks/results
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from common import RESULTS, write_result
from steps import begin, knowing, random_task
from torch import Tensor

import rankup
from rankup.layers.conv import FactoredConv
from rankup.layers.factored import FactoredLayer
from rankup.training.batches import _CHUNK
from rankup.training.evaluate import fraction_correct
from rankup.utils.malloc import keep_freed_memory

SHAPE, CLASSES, WIDTH, BATCH, KNOWN = (3, 32, 32), 5, 20, 64, 5
WAYS = {
    "rankup": "all of it",
    "layout": "but images lie as they come",
    "factors": "but new factors go apart from frozen ones",
    "memory": "but memory goes back to the system",
    "dense": "dense, in a plain loop with torch's Adam",
}


def ours(rows: Tensor) -> Callable[[], None]:
    """As in `rankup run` when the network knows some tasks."""
    task = random_task(SHAPE, CLASSES, rows.numel())
    rank = rankup.Rank.proportional(0.1, 0.02)
    net = knowing(rankup.models.resnet18(width=WIDTH), rank, KNOWN, task, 0, "cpu")
    learning = begin([net], task, rankup.Recipe(batch=BATCH, crop=3, flip=True), "cpu")
    (pupil,), steps = learning.pupils, learning.steps

    def run() -> None:
        drawn = steps.learners[0].sample_epoch(torch.Generator().manual_seed(0))
        steps.epoch([drawn], [[1e-3] * len(rows)], 0)
        steps.adopt()
        samples = steps.learners[0].feed.train(rows.numel())
        fraction_correct(lambda x: pupil.predict(x, KNOWN), samples)

    return run


def dense(rows: Tensor) -> Callable[[], None]:
    """With preprocessed images: no crops and no flips."""
    task = random_task(SHAPE, CLASSES, rows.numel())
    net = rankup.models.resnet18(width=WIDTH, classes=CLASSES)
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-3)
    x, y = task.train_x.float() / 255, task.train_y

    def run() -> None:
        for batch in rows:
            optimiser.zero_grad()
            F.cross_entropy(net(x[batch]), y[batch]).backward()
            optimiser.step()
        net.eval()
        with torch.no_grad():
            for part in x.split(_CHUNK):
                net(part).argmax(1)
        net.train()

    return run


def measured(way: str, steps: int) -> float:
    """Milliseconds per batch, each learned and answered once."""
    rows = torch.arange(steps * BATCH).view(-1, BATCH)
    if way not in ("memory", "dense"):
        keep_freed_memory()
    without = {
        "layout": patch("rankup.training.memory_format._runs", lambda *_: False),
        "factors": patch.object(FactoredConv, "_factored", FactoredLayer._factored),
    }
    with without.get(way, nullcontext()):
        run = dense(rows) if way == "dense" else ours(rows)
        run()  # the first round warms up
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) / steps * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=39, help="batches in a repeat")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--one", choices=WAYS, help="measure this way alone, in this process")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.one:
        print(measured(options.one, options.steps))
        return
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(options.repeats):
        for way, values in times.items():
            numbers = ["--steps", str(options.steps), "--threads", str(options.threads)]
            command = [sys.executable, __file__, "--one", way, *numbers]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            values.append(float(done.stdout))
    medians = {way: statistics.median(values) for way, values in times.items()}
    print(f"ResNet18 of width {WIDTH}, batch {BATCH}, {options.threads} threads, ms per batch")
    for way, median in medians.items():
        print(f"  {WAYS[way]:42} {median:8.0f}   {median / medians['rankup']:.2f} times ours")
    result = {"ms_per_batch": times, "medians": medians}
    path = write_result("convolutions", result, threads=str(options.threads), folder=options.out)
    print(f"written to {path}")


if __name__ == "__main__":
    main()

"""Training images per second on the CPU: our step, the paper notebook's way of stepping, and a
dense network of the same widths in a plain loop. Medians over repeats, all in one run.

    python benchmarks/cpu.py            # a table, and a dated JSON in benchmarks/results
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from common import RESULTS, write_result
from notebook import notebook
from steps import begin, knowing, random_task
from torch import Tensor

import rankup
from rankup.data.tasks import Task

SAMPLES, PIXELS, CLASSES, BATCH = 60_000, 784, 10, 128
Step = Callable[[Tensor], None]  # of one batch's rows
Run = Callable[[Tensor], None]  # of several batches' rows


def ours(rank: int, task: Task) -> Run:
    """The steps of `fit` when a layer's rank has grown to `rank`."""
    rule = rankup.Rank(first=11, step=1)
    net = knowing(rankup.models.mlp(PIXELS), rule, rank - 11, task, 0, "cpu")
    steps = begin([net], task, rankup.Recipe(batch=BATCH), "cpu").steps

    def run(rows: Tensor) -> None:
        steps.epoch([{"rows": rows}], [[1e-3] * len(rows)], 0)

    return run


def one_by_one(step: Step) -> Run:
    def run(rows: Tensor) -> None:
        for batch in rows:
            step(batch)

    return run


def dense(x: Tensor, y: Tensor) -> Step:
    """A dense network of the same widths, with its data in one tensor and torch's Adam."""
    net = rankup.models.mlp(PIXELS)
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-3)
    pixels = x.flatten(1).float() / 255

    def step(rows: Tensor) -> None:
        optimiser.zero_grad()
        F.cross_entropy(net(pixels[rows]), y[rows]).backward()
        optimiser.step()

    return step


def measure(runs: dict[str, Run], repeats: int, length: int) -> dict[str, list[float]]:
    """Images per second, the candidates taking turns so that all see the same machine."""
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1))
    rows = order[: SAMPLES // BATCH * BATCH].view(-1, BATCH)
    batches = rows[torch.arange(length) % len(rows)]
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(-1, repeats):
        for name, run in runs.items():
            started = time.perf_counter()
            run(batches)
            if repeat >= 0:  # the first round warms up
                rates[name].append(length * BATCH / (time.perf_counter() - started))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=20, help="rank of a layer when measured")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", type=int, default=200, help="steps in a repeat")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    task = random_task((1, 28, 28), CLASSES, SAMPLES)
    x, y = task.train_x, task.train_y
    runs = {
        "rankup": ours(options.rank, task),
        "notebook": one_by_one(notebook(options.rank, x, y, CLASSES)),
        "dense": one_by_one(dense(x, y)),
    }
    rates = measure(runs, options.repeats, options.steps)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"rank {options.rank}, batch {BATCH}, {options.threads} threads, images per second")
    for name, median in medians.items():
        ratio = medians["rankup"] / median
        print(f"  {name:10} {median:10,.0f}   rankup is {ratio:.2f} times that")
    measured = {"images_per_second": rates, "medians": medians}
    path = write_result("cpu", measured, threads=str(options.threads), folder=options.out)
    print(f"written to {path}")


if __name__ == "__main__":
    main()

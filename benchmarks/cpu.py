"""Training images per second on the CPU: our step, the paper notebook's way of stepping, and a
dense network of the same widths in a plain loop. Medians over repeats, all in one run.

    python benchmarks/cpu.py            # a table, and a dated JSON in benchmarks/results
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from common import RESULTS, write_result
from torch import Tensor, nn

import rankup
from rankup.data.tasks import Task
from rankup.optimiser import FlatAdam
from rankup.recipe import Recipe
from rankup.train import Feed, _train_logits, loss_of

SAMPLES, PIXELS, CLASSES, BATCH = 60_000, 784, 10, 128
Step = Callable[[Tensor], None]


def images() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (SAMPLES, 1, 28, 28), generator=draw, dtype=torch.uint8)
    return x, torch.randint(CLASSES, (SAMPLES,), generator=draw)


def ours(rank: int, x: Tensor, y: Tensor) -> Step:
    """The step that `fit` takes when a layer's rank has grown to `rank`."""
    net = rankup.grow(rankup.models.mlp(PIXELS), rankup.Rank(first=11, step=1))
    for index in range(rank - 11):
        net.begin_task(f"{index}", CLASSES)
        net.commit_task()
    net.begin_task("measured", CLASSES)
    recipe = Recipe()
    feed = Feed(Task("measured", CLASSES, x, y, x[:100], y[:100]), recipe, torch.device("cpu"))
    logits, draw = _train_logits(net, feed), torch.Generator()
    optimiser = FlatAdam(list(net.parameters()), recipe.weight_decay)

    def step(rows: Tensor) -> None:
        loss = loss_of(recipe, logits(rows, draw), feed.task.train_y.index_select(0, rows))
        optimiser.step(loss, 10, 1e-3)

    return step


class NotebookLayer(nn.Module):
    """A factored layer as the notebook has it: W is built from all factors at every step."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.old_U = torch.randn(outputs, rank - 1)
        self.old_V = torch.randn(inputs, rank - 1)
        self.U = nn.Parameter(torch.randn(outputs, 1))
        self.V = nn.Parameter(torch.randn(inputs, 1))
        self.old_s = nn.Parameter(torch.zeros(rank - 1))
        self.s = nn.Parameter(torch.ones(1))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        old = self.old_U @ torch.diag(self.old_s) @ self.old_V.t()
        weight = old + self.U @ torch.diag(self.s) @ self.V.t()
        return x @ weight.t() + self.bias


def notebook(rank: int, x: Tensor, y: Tensor) -> Step:
    """Batches gathered in numpy and copied, W rebuilt, squared error of the softmax, predictions
    copied back for the running accuracy: at every step."""
    net = nn.Sequential(
        NotebookLayer(PIXELS, 256, rank),
        nn.ReLU(),
        NotebookLayer(256, 256, rank),
        nn.ReLU(),
        nn.Linear(256, CLASSES),
        nn.Softmax(1),
    )
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-4)
    pixels = x.flatten(1).numpy().astype(np.float32)
    labels = y.numpy()
    wanted = np.eye(CLASSES, dtype=np.float32)[labels]
    right = 0

    def step(rows: Tensor) -> None:
        nonlocal right
        index = rows.numpy()
        optimiser.zero_grad()
        output = net(torch.tensor(pixels[index]))
        F.mse_loss(output, torch.tensor(wanted[index])).backward()
        optimiser.step()
        right += int((output.detach().numpy().argmax(1) == labels[index]).sum())

    return step


def dense(x: Tensor, y: Tensor) -> Step:
    """A dense network of the same widths, its data in one tensor, torch's Adam."""
    net = rankup.models.mlp(PIXELS)
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-3)
    pixels = x.flatten(1).float() / 255

    def step(rows: Tensor) -> None:
        optimiser.zero_grad()
        F.cross_entropy(net(pixels[rows]), y[rows]).backward()
        optimiser.step()

    return step


def measure(steps: dict[str, Step], repeats: int, length: int) -> dict[str, list[float]]:
    """Images per second, the candidates taking turns so that all see the same machine."""
    rows = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1)).split(BATCH)
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(-1, repeats):
        for name, step in steps.items():
            started = time.perf_counter()
            for index in range(length):
                step(rows[index % (len(rows) - 1)])
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
    x, y = images()
    steps = {
        "rankup": ours(options.rank, x, y),
        "notebook": notebook(options.rank, x, y),
        "dense": dense(x, y),
    }
    rates = measure(steps, options.repeats, options.steps)
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

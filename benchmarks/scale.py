"""A model of time, memory and traffic beyond the machines at hand, checked at the small end.

    python benchmarks/scale.py            # all tables of docs/scale.md
    python benchmarks/scale.py paper      # one of: paper, tasks, server, check

Nothing here needs a GPU or a cluster: it computes from measured times (results/) and from shapes.
"""

import argparse
import heapq
import json
import random
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import nn

import rankup

RESULTS = Path(__file__).parents[1] / "results"
FLOAT = 4  # bytes
GB, MB = 1e9, 1e6


# The paper on several GPUs ---------------------------------------------------------------------


def makespan(seconds: Iterable[float], workers: int) -> float:
    """When the last job ends if each worker takes the next one as it becomes free.

    >>> makespan([3, 2, 2], 2), makespan([3, 2, 2], 3)
    (4.0, 3.0)
    """
    free = [0.0] * workers
    for job in seconds:
        heapq.heappush(free, heapq.heappop(free) + job)
    return max(free)


def settings() -> dict[str, list[float]]:
    """The seconds that each setting took on the H200, by how many of them share a GPU."""
    found: dict[str, list[float]] = {"large": [], "small": []}
    for path in RESULTS.glob("*-*/*.json"):
        content = json.loads(path.read_text())
        known = content["known"]
        large = known["net"] != "mlp" or known["stream"] == "s-miniimagenet"
        found["large" if large else "small"].append(sum(r["seconds"] for r in content["runs"]))
    return {kind: sorted(each, reverse=True) for kind, each in found.items()}


def paper() -> None:
    """Large networks first, a fourth as many at once as small ones, as `rankup paper --jobs 8`."""
    jobs = settings()
    print(f"{len(jobs['large']) + len(jobs['small'])} settings, --jobs 8; measured: 114 min on one")
    print("GPUs   minutes   GPU hours   of which idle")
    for gpus in (1, 2, 4, 8, 16, 32, 64):
        ends = [makespan(jobs["large"], 2 * gpus), makespan(jobs["small"], 8 * gpus)]
        busy = sum(jobs["large"]) / 2 + sum(jobs["small"]) / 8
        idle = 1 - busy / (sum(ends) * gpus)
        print(f"{gpus:4} {sum(ends) / 60:9.1f} {gpus * sum(ends) / 3600:11.1f} {idle:14.0%}")


# A large base ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transformer:
    """Blocks of four `d × d` layers and two between `d` and `4 d`, all factored."""

    width: int
    blocks: int
    rank: int = 1  # that a task adds
    classes: int = 10

    @property
    def layers(self) -> list[tuple[int, int]]:
        d = self.width
        return [(d, d)] * 4 + [(d, 4 * d), (4 * d, d)]

    @property
    def base(self) -> int:
        return self.blocks * sum(i * o for i, o in self.layers)

    def added(self, task: int) -> int:
        """Numbers that a task stores: factors, selectors over all of them, biases, norms, head."""
        per_block = sum(self.rank * (i + o) + self.rank * (task + 1) + o for i, o in self.layers)
        return self.blocks * (per_block + 4 * self.width) + self.classes * (self.width + 1)

    def tables(self, tasks: int) -> int:
        """Numbers in memory for all tasks: selectors are rows of one length."""
        stored = sum(self.added(task) for task in range(tasks))
        selectors = self.blocks * len(self.layers) * self.rank
        return stored + selectors * (tasks * tasks - tasks * (tasks + 1) // 2)

    def products(self, factors: int) -> float:
        """Multiplications for one position: of the base, and of so many factors in each layer."""
        return self.base + self.blocks * factors * sum(i + o for i, o in self.layers)


def tasks() -> None:
    print("base of 16-bit, tasks of 32-bit numbers; N GPUs; per rank; a step's traffic is sent and")
    print("received by each rank; an answer, of one task or mixed, relative to the base alone")
    head = f"{'base':>6} {'tasks':>6} {'N':>3} {'base GB':>8} {'tables GB':>10} {'a task MB':>10}"
    print(f"{head} {'gradient MB':>12} {'gathered GB':>12} {'an answer':>10}")
    for model in (Transformer(2048, 20), Transformer(4096, 35)):
        for count in (10, 100, 1000):
            for ranks in (1, 8):
                trained = model.added(count - 1)
                kept = (ranks - 1) / ranks
                row = (
                    f"{model.base / GB:5.1f}B {count:6} {ranks:3} "
                    f"{2 * model.base / ranks / GB:8.2f} "
                    f"{FLOAT * model.tables(count) / GB:10.2f} "
                    f"{FLOAT * model.added(count - 1) / MB:10.2f} "
                    f"{2 * kept * FLOAT * trained / MB:12.2f} "
                    f"{2 * kept * 2 * model.base / GB:12.2f} "
                )
                every = model.products(model.rank * count) / model.base
                print(f"{row} {every:10.2f}")


# A server --------------------------------------------------------------------------------------


def zipf_hits(tasks: int, cached: int, *, exponent: float, requests: int, seed: int = 0) -> float:
    """How many of these requests find their task in a cache of the last used ones, once it is
    full."""
    draw = random.Random(seed)
    weights = list(accumulate((rank + 1) ** -exponent for rank in range(tasks)))
    cache: OrderedDict[int, None] = OrderedDict()
    hits = counted = 0
    for number, task in enumerate(draw.choices(range(tasks), cum_weights=weights, k=requests)):
        hit = task in cache
        if number >= requests // 2:
            hits, counted = hits + hit, counted + 1
        cache[task] = None
        cache.move_to_end(task)
        if len(cache) > cached:
            cache.popitem(last=False)
    return hits / counted


def server() -> None:
    """Tasks that select from factors of their own alone, on a base of ViT-B's size."""
    model, count = Transformer(768, 12, rank=4), 100_000
    own = model.added(0)
    print(f"{count:,} tasks of rank 4 on a base of {model.base / MB:.0f} million numbers")
    every = FLOAT * model.blocks * len(model.layers) * (model.rank * count) ** 2 / model.rank
    print(f"selecting from all: selectors of {every / 1e12:.0f} TB, which fit nowhere")
    for form, size in (("float32", FLOAT), ("float16", 2), ("int8", 1)):
        each, together = size * own / MB, size * own * count / GB
        print(f"own factors, {form}: {each:.2f} MB a task, {together:.0f} GB")
    print("cached   GB (float32)   hits at Zipf 0.8, 1.0, 1.2   ms paged in for a batch of 256")
    for cached in (1_000, 10_000, 30_000):
        hits = [zipf_hits(count, cached, exponent=e, requests=200_000) for e in (0.8, 1.0, 1.2)]
        paged = 256 * (1 - hits[1]) * FLOAT * own / 25e9  # at 25 GB/s over PCIe
        shown = ", ".join(f"{each:.0%}" for each in hits)
        print(f"{cached:6,} {cached * FLOAT * own / GB:14.1f} {shown:>28} {1e3 * paged:25.1f}")


# Checks ----------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2))
        self.square = nn.ModuleList(nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        for layer in self.square:
            y = layer(y)
        return x + self.down(self.up(self.norms[1](x + y)).relu())


def check() -> None:
    """What the model counts against a network that is made, and products against CPU time."""
    model = Transformer(256, 2)
    blocks = [Block(model.width) for _ in range(model.blocks)]
    body = nn.Sequential(*blocks, nn.Linear(model.width, 10))
    torch.manual_seed(0)
    for count in (1, 20):
        net = rankup.grow(body, rankup.Rank(first=1, step=1), base="keep", head=str(model.blocks))
        for task in range(count):
            net.begin_task(f"t{task}", 10)
            trained = sum(p.numel() for p in net.parameters())
            net.commit_task()
        added = net.size(f"t{count - 1}").total
        print(
            f"task {count}: trained {trained:,} (model {model.added(count - 1):,}), stored "
            f"{added:,} (model {model.added(count - 1):,})"
        )
    base, mixed = _times(net, body, count)
    expected = model.products(count) / model.base
    print(
        f"mixed batch of 256, {count} tasks: {mixed / base:.2f} times the base's CPU time, by "
        f"products {expected:.2f}"
    )


def _times(net: nn.Module, body: nn.Module, count: int) -> Sequence[float]:
    x = torch.randn(256, 256)
    ids = torch.arange(256) % count
    best = [float("inf")] * 2
    with torch.no_grad():
        for _ in range(15):  # in turn, and the least: others use the cores, too
            for number, call in enumerate((lambda: body(x), lambda: net(x, ids))):
                begun = time.process_time()
                for _ in range(5):
                    call()
                best[number] = min(best[number], time.process_time() - begun)
    return best


PARTS = {"paper": paper, "tasks": tasks, "server": server, "check": check}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="*", choices=[*PARTS, []], default=[])
    torch.set_num_threads(1)
    for name in parser.parse_args().part or PARTS:
        print(f"\n{name}\n")
        PARTS[name]()

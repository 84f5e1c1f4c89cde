"""Five seeds on the CPU: together, with a one-thread process per core, against one after another,
each with as many threads as cores. Whole runs of Permuted MNIST except for the report page; the
start-up of processes is included.

    RANKUP_DATA=… python benchmarks/seeds.py
"""

import argparse
import os
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

from common import RESULTS, write_result

from rankup.data.streams import make_stream
from rankup.runs.folder import RunConfig
from rankup.runs.many_seeds import run_seeds
from rankup.runs.seed_run import SeedRun, versions
from rankup.training.recipe import recipe_for


def asked(seeds: range, tasks: int, epochs: int, threads: int, folder: Path) -> list[SeedRun]:
    recipe = replace(recipe_for("default"), epochs=epochs)
    return [
        SeedRun(
            RunConfig(
                stream="p-mnist",
                method="rank",
                options={},
                net="mlp",
                width=256,
                rank="11,1",
                seeded=None,
                tasks=tasks,
                seed=seed,
                device="cpu",
                threads=threads,
                recipe={"name": "default", **asdict(recipe)},
                task_names=[],
                versions=versions(),
            ),
            None,
            folder / f"{threads}-{seed}",
        )
        for seed in seeds
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    make_stream("p-mnist", tasks=1)  # decodes the data into the cache, untimed
    seconds: dict[str, list[float]] = {"together": [], "one after another": []}
    for repeat in range(options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            sizes = range(options.seeds), options.tasks, options.epochs
            print(f"repeat {repeat + 1}: together", file=sys.stderr)
            started = time.perf_counter()
            run_seeds(asked(*sizes, 1, Path(folder)), note=print)
            seconds["together"].append(time.perf_counter() - started)
            print(f"repeat {repeat + 1}: one after another", file=sys.stderr)
            started = time.perf_counter()
            for seed in asked(*sizes, cores, Path(folder)):
                run_seeds([seed], note=print)
            seconds["one after another"].append(time.perf_counter() - started)
    images = options.seeds * options.tasks * options.epochs * 60_000
    rates = {name: [images / each for each in values] for name, values in seconds.items()}
    ratios = [b / a for a, b in zip(seconds["together"], seconds["one after another"], strict=True)]
    print(f"{options.seeds} seeds on {cores} cores, thousand images per second")
    for name, values in rates.items():
        print(f"  {name:18}" + "".join(f"{value / 1000:8.1f}" for value in values))
    print("  ratio             " + "".join(f"{ratio:8.2f}" for ratio in ratios) + "   (bar 1.4)")
    result = {"seconds": seconds, "images_per_second": rates, "ratios": ratios}
    path = write_result("seeds", result, threads=str(cores), folder=options.out)
    print(f"written to {path}")


if __name__ == "__main__":
    main()

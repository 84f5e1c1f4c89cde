"""A pretrained network learns streams of tasks: accuracy and bytes beside those of PEFT's adapters.

    python benchmarks/pretrained.py FOLDER DATA --out cells.jsonl --stream clinc150 --shots 5
    python benchmarks/pretrained.py MOBILENET.pt DATA --out cells.jsonl --stream photos --shots 5
    python benchmarks/pretrained.py FOLDER DATA --out cells.jsonl --table

FOLDER holds an encoder of texts (`config.json`, `model.safetensors`, a tokenizer), MOBILENET.pt the
weights of torchvision's MobileNetV2, DATA the folders of the data sets. A cell is a method on a
stream with a seed, which draws the examples and the order of tasks; cells that the file has already
are not run again. All methods get the same batches, number of steps, schedule, dropout, and heads
that start from their classes' means. With `--held-out` they are tested on other training data, to
choose settings.
"""

import argparse
import json
import math
import multiprocessing
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from adapters import learn_each, matrices
from pretrained_streams import STREAMS, TEXTS, module_of, tasks_of
from torch import nn

import rankup
from rankup.data.tasks import Task
from rankup.layers import FactoredLayer
from rankup.training.fit import data_traits
from rankup.training.recipe import Recipe, recipe_for

# Rates by method, or by kind of method, each of three by held-out data: of both streams, or for
# lora:8 and vera of the other one. Those of RandLoRA and of whole networks are not searched.
RATES = {
    "ours": {"clinc150": 3e-3, "banking77": 3e-3},
    "linear": {"clinc150": 1e-2, "banking77": 1e-2},
    "lora": {"clinc150": 3e-3, "banking77": 3e-3},
    "lora:8": {"clinc150": 1e-3, "banking77": 1e-3},
    "continued": {"clinc150": 1e-3, "banking77": 1e-3},
    "vera": {"clinc150": 1e-3, "banking77": 1e-2},
    "randlora": {"clinc150": 3e-3, "banking77": 3e-3},
    "full": {"clinc150": 1e-4, "banking77": 1e-4},
}
_UNSEARCHED = 3e-3


def chosen_rate(method: str, stream: str) -> float:
    return RATES.get(method, RATES[method.partition(":")[0]]).get(stream, _UNSEARCHED)


@dataclass(frozen=True)
class Cell:
    """A method, such as `ours:1`, `lora:8` or `linear`, on a stream.

    `ours:RANK` may be followed by `int8` (how tasks are stored), `per-task` (norms and biases) and
    `previous` or `halfway` (where selectors start); to be compared with, by `alone` (no task
    selects from another's factors) and `random` (random factors of the same length stand in for
    those that earlier tasks learned).
    """

    method: str
    stream: str
    shots: int  # examples of each class; 0: all
    seed: int
    lr: float
    held_out: bool
    rich: int = 0  # so many tasks with all their examples come first, which are not counted

    @property
    def options(self) -> list[str]:
        return self.method.split(":")[1:]


def run(cell: Cell, folder: Path, data: Path) -> dict[str, Any]:
    """Learn a stream and test each task when it is learned: no method here forgets one."""
    start = time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.set_num_threads(1)
    torch.manual_seed(cell.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = module_of(cell.stream, folder)
    stream = tasks_of(
        cell.stream,
        data,
        module,
        shots=cell.shots,
        seed=cell.seed,
        held_out=cell.held_out,
        rich=cell.rich,
    )
    tasks = [task.to(device) for task in stream]
    module.to(device)
    parts = tasks[: cell.rich], tasks[cell.rich :]
    recipes = [recipe_of(cell, part) for part in parts for _ in part]
    if cell.method.startswith("ours"):
        accuracies, sizes = learn_ours(cell, module, tasks, recipes)
    else:
        accuracies, sizes = learn_each(cell.method, module, tasks, recipes, cell.seed)
    accuracies, size = accuracies[cell.rich :], sum(sizes[cell.rich :])
    seconds = round(time.perf_counter() - start, 1)
    return asdict(cell) | {"accuracies": accuracies, "bytes": size, "seconds": seconds}


def recipe_of(cell: Cell, tasks: Sequence[Task]) -> Recipe:
    recipe = replace(
        recipe_for("default", kept=True, **data_traits(tasks)),
        precision="tf32" if tasks[0].train_x.is_cuda else "float32",
        lr=cell.lr,
    )
    starts = [option for option in cell.options if option in ("previous", "halfway")]
    return replace(recipe, selectors=starts[0]) if starts else recipe


def learn_ours(
    cell: Cell, module: nn.Module, tasks: Sequence[Task], recipes: Sequence[Recipe]
) -> tuple[list[float], list[int]]:
    rank, options = int(cell.options[0]), cell.options[1:]
    net = rankup.grow(
        module,
        rankup.Rank(rank, rank),
        base="keep",
        include=None if cell.stream in TEXTS else matrices(module),
        seed=cell.seed,
        store="int8" if "int8" in options else "full",
        vectors="per task" if "per-task" in options else "shared",
    )
    accuracies = []
    for task, recipe in zip(tasks, recipes, strict=True):
        rankup.fit(net, task, recipe, uses="own" if "alone" in options else "all")
        accuracies.append(rankup.accuracy(net, task))
        if "random" in options:
            _randomise(net, rank, seed=len(accuracies))
    return accuracies, [net.size(task=name).bytes for name in net.tasks]


@torch.no_grad()
def _randomise(net: rankup.IncrementalNet, rank: int, seed: int) -> None:
    """Turn the factors that the last task learned into random directions."""
    generator = torch.Generator().manual_seed(seed)
    for layer in net.modules():
        if isinstance(layer, FactoredLayer):
            for table in (layer.U, layer.V):
                lengths = table[-rank:].norm(dim=1, keepdim=True)
                drawn = torch.randn(rank, table.shape[1], generator=generator).to(table)
                table[-rank:] = F.normalize(drawn, dim=1) * lengths


def show(cells: Sequence[dict[str, Any]], against: str) -> None:
    """A line for each method: accuracy, what it stores, and how far it is from another one, paired
    over seeds, with the standard error."""
    found: dict[tuple[Any, ...], dict[str, dict[int, dict[str, Any]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for cell in cells:
        where = cell["stream"], cell["shots"], cell["held_out"], cell.get("rich", 0)
        found[where][f"{cell['method']} @{cell['lr']:g}"][cell["seed"]] = cell
    for (stream, shots, held_out, rich), methods in sorted(found.items()):
        after = f", after {rich} tasks with all" if rich else ""
        data = "held-out data" if held_out else "test data"
        examples = f"{shots} examples of each class" if shots else "all data"
        print(f"\n{stream}, {examples}{after}, {data}")
        other = next((of for name, of in methods.items() if name.startswith(against)), {})
        for method, seeds in sorted(methods.items(), key=lambda item: -_mean(item[1].values())):
            gains = [_mean([seeds[s]]) - _mean([other[s]]) for s in seeds if s in other]
            size = statistics.mean(cell["bytes"] for cell in seeds.values())
            print(
                f"  {method:28} {_mean(seeds.values()):6.2f} {_paired(gains):>15} "
                f"{size / 1e6:8.2f} MB  {len(seeds)} seeds"
            )


def _mean(cells: Any) -> float:
    return 100 * statistics.mean(statistics.mean(cell["accuracies"]) for cell in cells)


def _paired(gains: Sequence[float]) -> str:
    if len(gains) < 2:
        return "".join(f"{gain:+.2f}" for gain in gains)
    return f"{statistics.mean(gains):+.2f} ± {statistics.stdev(gains) / math.sqrt(len(gains)):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stream", nargs="+", choices=STREAMS, default=[*TEXTS])
    parser.add_argument("--shots", nargs="+", type=int, default=[5], help="0: all examples")
    parser.add_argument("--methods", nargs="+", default=["ours:1", "lora:1", "linear"])
    parser.add_argument("--rates", nargs="+", type=float, help="in place of the chosen ones")
    parser.add_argument("--trials", type=Path, help="a file of --held-out to choose rates by")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--rich", type=int, default=0, help="tasks with all examples come first")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no cell after this")
    parser.add_argument("--table", action="store_true", help="only show what the file has")
    parser.add_argument("--against", default="lora:1")
    given = parser.parse_args()
    lines = given.out.read_text().splitlines() if given.out.exists() else []
    done = [json.loads(line) for line in lines]
    if not given.table:
        cells = [
            Cell(method, stream, shots, seed, rate, given.held_out, given.rich)
            for shots in given.shots
            for stream in given.stream
            for seed in given.seeds
            for method in given.methods
            for rate in given.rates or [_rate_by(given.trials, method, stream, shots)]
        ]
        keys = Cell.__dataclass_fields__
        known = [{key: ({"rich": 0} | cell)[key] for key in keys} for cell in done]
        todo = [cell for cell in cells if asdict(cell) not in known]
        done += run_all(todo, given)
    show(done, given.against)


def _rate_by(trials: Path | None, method: str, stream: str, shots: int) -> float:
    """The rate with the best mean over the trials on held-out data that a file has of a method."""
    found = defaultdict(list)
    for line in trials.read_text().splitlines() if trials else ():
        cell = json.loads(line)
        if (cell["method"], cell["stream"], cell["shots"]) == (method, stream, shots):
            assert cell["held_out"]
            found[cell["lr"]].append(_mean([cell]))
    if found:
        return max(found, key=lambda rate: statistics.mean(found[rate]))
    return chosen_rate(method, stream)


def run_all(cells: Sequence[Cell], given: argparse.Namespace) -> list[dict[str, Any]]:
    start, found = time.perf_counter(), []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.jobs, mp_context=context) as pool, given.out.open("a") as file:
        waiting = list(reversed(cells))
        running: dict[Any, Cell] = {}
        while waiting or running:
            while waiting and len(running) < given.jobs:
                if time.perf_counter() - start > given.seconds:
                    waiting.clear()
                    break
                cell = waiting.pop()
                running[pool.submit(run, cell, given.folder, given.data)] = cell
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                cell = running.pop(future)
                try:
                    result = future.result()
                except Exception as error:  # the others are still worth having
                    print(f"{cell.method} {cell.stream} {cell.seed} failed: {error}", flush=True)
                    continue
                found.append(result)
                file.write(json.dumps(result) + "\n")
                file.flush()
                said = f"{cell.stream} {cell.shots} seed {cell.seed} {cell.method} {cell.lr:g}"
                print(f"{said}: {_mean([result]):.2f} in {result['seconds']} s", flush=True)
    return found


if __name__ == "__main__":
    main()

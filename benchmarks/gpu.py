"""Training on a GPU: the time of a step beside the paper notebook's, the time of whole runs from
the command line beside their bars, and how far steps are from what the machine allows.

    python benchmarks/gpu.py                            # tables, and a dated JSON in results
    python benchmarks/gpu.py --only steps               # or some of it: steps, p-mnist, seeded,
    python benchmarks/gpu.py --only resnet1,resnet5     # resnet1, resnet5; a day's are merged

Steps: medians over epochs, the candidates taking turns; an epoch is as `fit` takes it, its random
draws and the look at its losses included. The notebook's MLP has as many factors per layer as ours.

Runs: `rankup run` in a process of its own, from start-up to report page. A first tiny run outside
the time decodes the data into the cache and compiles Python's modules to bytecode, as an
installation does; what a run captures or compiles is inside the time. MNIST and CIFAR-100 must be
there already: RANKUP_DATA or --data names the folder that holds them.

Floors: copies and multiplications of large matrices are timed in the same process; a step's floor
is what it needs by formula at those rates. Kernels are counted in replays of the step's graph, and
compared with as many that do nothing.

`--device cpu --small` goes through all of it with tiny numbers, to see that it works.
"""

import argparse
import functools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, device_name, wait, write_result
from notebook import notebook
from steps import Epoch, Learning, begin, knowing, measure, random_task
from theory import Need, step_needs
from torch import Tensor
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

import rankup
from rankup.chain import ChainLearner
from rankup.data.tasks import Task
from rankup.graph import Graph
from rankup.recipe import Recipe, recipe_for

REPLAYS = 10  # of a graph while its kernels are counted
EMPTY = 100  # kernels that do nothing, in one graph
SMALL = "--epochs 5 --tasks 5 --width 16"


# Whole runs


@dataclass(frozen=True)
class Run:
    stream: str
    arguments: str
    bar: float  # seconds
    moonshot: float
    accuracy: float  # bar, in per cent
    seeds: int = 5

    def command(self, device: str, small: bool) -> list[str]:
        stream = self.stream
        if small:
            stream = {"p-mnist": "p-digits", "s-cifar100": "s-digits"}[stream]
        words = f"--device {device} --stream {stream} {self.arguments} --seeds {self.seeds}"
        return shlex.split(f"{words} {SMALL}" if small else words)


_SEEDED = "--rank 0,0 --seeded 1536,768 --epochs 20 --lr 3e-2 --weight-decay 0.05"
_RESNET = "--net resnet18 --epochs 20"
RUNS = {
    "p-mnist": Run("p-mnist", "--epochs 5", 15, 6, 85.6),
    "seeded": Run("p-mnist", _SEEDED, 90, 30, 96.9),
    "resnet1": Run("s-cifar100", _RESNET, 50, 20, 83, seeds=1),
    "resnet5": Run("s-cifar100", _RESNET, 110, 45, 83),
}


class RunFailed(Exception):
    pass


def rankup_run(command: list[str], out: Path) -> tuple[float, list[str]]:
    """Seconds that the command line takes, and what it had to say."""
    source = str(Path(rankup.__file__).parents[1])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])),
        "PYTHONPYCACHEPREFIX": str(out.parent / "bytecode"),
        "TRITON_CACHE_DIR": str(out.parent / f"{out.name}-kernels"),  # each run compiles its own
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    words = [sys.executable, "-m", "rankup", "run", *command, "--out", str(out)]
    started = time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    seconds = time.perf_counter() - started
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise RunFailed("\n".join(said[-5:]))
    return seconds, [line for line in done.stderr.splitlines() if line.startswith("rankup:")]


def accuracies(out: Path) -> list[float]:
    """Of every seed after its last task, in per cent."""
    files = sorted(out.glob("seed-*/metrics.jsonl")) or [out / "metrics.jsonl"]
    lines = [json.loads(path.read_text().splitlines()[-1]) for path in files]
    return [100 * line["average_accuracy"] for line in lines]


def measured_run(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    run = RUNS[name]
    command = [*run.command(options.device, options.small), *data_option(options)]
    times, reached, notes = [], [], []
    for number in range(options.runs):
        out = folder / f"{name}-{number}"
        seconds, said = rankup_run(command, out)
        times.append(seconds)
        reached.append(accuracies(out))
        notes += said
    return {
        "arguments": shlex.join(command),
        "seconds": times,
        "accuracies": reached,
        "bar_seconds": run.bar,
        "moonshot_seconds": run.moonshot,
        "bar_accuracy": run.accuracy,
        "notes": list(dict.fromkeys(notes)),
    }


def data_option(options: argparse.Namespace) -> list[str]:
    return ["--data", str(options.data)] if options.data else []


def fill_cache(names: list[str], options: argparse.Namespace, folder: Path) -> None:
    """A tiny run for every stream that will be used."""
    for stream in dict.fromkeys(RUNS[name].stream for name in names):
        run = next(RUNS[name] for name in names if RUNS[name].stream == stream)
        words = replace(run, seeds=1).command(options.device, options.small)
        words += ["--epochs", "1"] if options.small else ["--epochs", "1", "--tasks", "1"]
        try:
            rankup_run([*words, *data_option(options)], folder / f"first-{stream}")
        except RunFailed as why:  # the runs themselves will say so if it matters
            print(f"the tiny run of {stream} failed: {why}", flush=True)


def run_line(name: str, result: dict[str, Any]) -> str:
    seconds = statistics.median(result["seconds"])
    reached = [value for run in result["accuracies"] for value in run]
    mean = statistics.mean(reached)
    spread = f"± {statistics.stdev(reached):.2f}" if len(reached) > 1 else ""
    met = [
        "moonshot"
        if seconds <= result["moonshot_seconds"]
        else "met"
        if seconds <= result["bar_seconds"]
        else "missed",
        "met" if mean >= result["bar_accuracy"] else "missed",
    ]
    return (
        f"{name:9}{seconds:8.1f}{result['bar_seconds']:6.0f}{result['moonshot_seconds']:6.0f}"
        f"  {met[0]:10}{mean:8.2f} {spread:7}{result['bar_accuracy']:7.1f}  {met[1]}"
    )


def whole_runs(names: list[str], options: argparse.Namespace, write: "Write") -> bool:
    """Whether all of them came to their end."""
    whole = True
    with tempfile.TemporaryDirectory() as folder:
        fill_cache(names, options, Path(folder))
        print("`rankup run` from start-up to report page; a tiny run before, outside the time,")
        print("decoded the data into the cache")
        print(
            f"{'case':9}{'seconds':>8}{'bar':>6}{'moon':>6}  {'':10}{'accuracy %':>11}{'bar':>12}"
        )
        for name in names:
            try:
                result = measured_run(name, options, Path(folder))
            except RunFailed as why:
                whole = False
                print(f"{name:9} failed: {why}", flush=True)
                continue
            print(run_line(name, result), flush=True)
            for note in result["notes"]:
                print(f"  {note}")
            write({"runs": {name: result}})
    print()
    return whole


# Steps


@dataclass(frozen=True)
class Case:
    net: str
    rank: rankup.Rank
    seeds: int
    tasks: int  # committed before the one that is learned
    classes: int
    shape: tuple[int, ...]
    samples: int

    def module(self) -> torch.nn.Module:
        return rankup.models.mlp(784) if self.net == "mlp" else rankup.models.resnet18(width=20)

    def recipe(self) -> Recipe:
        return recipe_for(
            "default",
            colour=self.net == "resnet18",
            size=self.shape[-1],
            samples=self.samples,
            net=self.net,
            learned=bool(self.rank.first),
            device="cuda",
        )


def mlp(seeds: int, rank: rankup.Rank) -> Case:
    return Case("mlp", rank, seeds, 10, 10, (1, 28, 28), 60_000)


def resnet(seeds: int) -> Case:
    rank = rankup.Rank.proportional(0.1, 0.02)
    return Case("resnet18", rank, seeds, 9, 5, (3, 32, 32), 2_500)


_GROWING, _CHOOSING = rankup.Rank(11, 1), rankup.Rank(0, 0, seeded=[1536, 768])
CASES = {
    "mlp": mlp(1, _GROWING),
    "mlp, 5 seeds": mlp(5, _GROWING),
    "mlp, 32 seeds": mlp(32, _GROWING),
    "seeded, 5 seeds": mlp(5, _CHOOSING),
    "resnet18": resnet(1),
    "resnet18, 5 seeds": resnet(5),
}
FACTORS = 21  # per layer: 20 of ten tasks, and the one that is learned


def task_of(case: Case, options: argparse.Namespace) -> Task:
    samples = min(case.samples, 4 * case.recipe().batch) if options.small else case.samples
    return random_task(case.shape, case.classes, samples).to(options.device)


def started(case: Case, options: argparse.Namespace) -> Learning:
    task, tasks = task_of(case, options), 2 if options.small else case.tasks
    nets = [
        knowing(case.module(), case.rank, tasks, task, seed, options.device)
        for seed in range(case.seeds)
    ]
    return begin(nets, task, case.recipe(), options.device)


def notebook_epoch(options: argparse.Namespace) -> Epoch:
    case = CASES["mlp"]
    task, batch = task_of(case, options), case.recipe().batch
    step = notebook(FACTORS, task.train_x, task.train_y, task.classes, options.device)
    rows = torch.randperm(len(task.train_y), generator=torch.Generator().manual_seed(0))

    def epoch() -> int:
        batches = torch.split(rows, batch)
        for each in batches:
            step(each)
        return len(batches)

    return epoch


def step_times(learning: dict[str, Learning], options: argparse.Namespace) -> dict[str, Any]:
    epochs: dict[str, Epoch] = {"notebook": notebook_epoch(options)}
    epochs |= {name: each.epoch for name, each in learning.items()}
    times = measure(epochs, options.repeats, options.device)
    medians = {name: statistics.median(values) for name, values in times.items()}
    results: dict[str, Any] = {}
    for name, values in times.items():
        seeds = CASES[name].seeds if name in CASES else 1
        results[name] = {
            "seeds": seeds,
            "microseconds": values,
            "median_microseconds": medians[name],
            "microseconds_per_seed": medians[name] / seeds,
        }
        if name in learning:
            each = learning[name]
            results[name] |= {
                "form": each.form,
                "learner": type(each.steps.learners[0]).__name__,
                "precision": CASES[name].recipe().precision,
                "capture_seconds": each.capture,
                "notes": each.notes,
            }
            if CASES[name].net == "mlp":
                results[name]["notebook_ratio"] = medians["notebook"] * seeds / medians[name]
    return results


def show_steps(results: dict[str, Any], device: str) -> None:
    print(f"a training step on {device_name(device)}; notebook / ours, by seed, is of the MLP")
    print(
        f"{'case':18}{'form':10}{'precision':10}{'µs/step':>9}{'µs/seed':>9}"
        f"{'capture s':>11}{'notebook':>10}"
    )
    for name, result in results.items():
        ratio = result.get("notebook_ratio")
        capture = result.get("capture_seconds")
        print(
            f"{name:18}{result.get('form', 'eager'):10}{result.get('precision', 'float32'):10}"
            f"{result['median_microseconds']:9.1f}{result['microseconds_per_seed']:9.1f}"
            f"{'–' if capture is None else f'{capture:.2f}':>11}"
            f"{'–' if ratio is None else f'{ratio:.1f}×':>10}"
        )
    for note in dict.fromkeys(note for r in results.values() for note in r.get("notes", ())):
        print(f"note: {note}")
    print(flush=True)


# Floors


def seconds_of(call: Callable[[], object], device: str, times: int, repeats: int = 5) -> float:
    for _ in range(2):  # warms up
        call()
    found = []
    for _ in range(repeats):
        wait(device)
        begun = time.perf_counter()
        for _ in range(times):
            call()
        wait(device)
        found.append((time.perf_counter() - begun) / times)
    return statistics.median(found)


def copy_seconds(size: int, device: str) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return seconds_of(lambda: target.copy_(source), device, 10)


def ceilings(options: argparse.Namespace) -> dict[str, float]:
    """Bytes per second of a large copy, read and written, and FLOP/s of large matrices."""
    device = options.device
    size, side = (2**20, 128) if options.small else (2**31, 8192)
    rates = {"copy": 2 * size / copy_seconds(size, device)}
    matrix = torch.randn(side, side, device=device)
    for name, precision, kind in (
        ("float32", "highest", torch.float32),
        ("tf32", "high", torch.float32),
        ("bfloat16", "highest", torch.bfloat16),
    ):
        factor = matrix.to(kind)
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        multiply = functools.partial(torch.mm, factor, factor)
        rates[name] = 2 * side**3 / seconds_of(multiply, device, 5)
        torch.set_float32_matmul_precision(before)
    return rates


def empty_kernel(options: argparse.Namespace) -> float:
    """Seconds that a kernel takes in a graph when it does next to nothing."""
    number = torch.zeros(1, device=options.device)

    def adds() -> None:
        for _ in range(EMPTY):
            number.add_(1)

    replay: Callable[[], object] = adds
    if options.device == "cuda":
        adds()
        wait(options.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            adds()
        replay = graph.replay
    return seconds_of(replay, options.device, 20) / EMPTY


def kernels_of(steps: Graph) -> dict[str, float]:
    """How many kernels a replay starts, copies counted, and the seconds for which each is busy,
    summed: more than pass where they run side by side."""
    replays = min(REPLAYS, len(steps.rates))
    steps.now.zero_()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as watch:
        for _ in range(replays):
            steps.graph.replay()
        torch.cuda.synchronize()
    events = [event for event in watch.events() or () if event.device_type == DeviceType.CUDA]
    busy = sum(event.time_range.elapsed_us() for event in events)
    return {"kernels": len(events) / replays, "busy_microseconds": busy / replays}


def needs_of(name: str, learning: Learning) -> Need:
    case, learner = CASES[name], learning.steps.learners[0]
    sample: Tensor = learner.feed.task.train_x[0]
    return step_needs(
        learning.pupils[0].net,
        case.module(),
        sample,
        learner.feed.batch_size,
        projected=isinstance(learner, ChainLearner) and learner.seen is not None,
        width=2 if case.recipe().precision == "bfloat16" else 4,
    ).times(case.seeds)


def floors(
    learning: dict[str, Learning], rates: dict[str, float], empty: float
) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    for name, each in learning.items():
        need = needs_of(name, each)
        precision = CASES[name].recipe().precision
        results[name] = {
            "flop": 2 * need.multiplications,
            "bytes": need.bytes,
            "arithmetic_microseconds": 2e6 * need.multiplications / rates[precision],
            "memory_microseconds": 1e6 * need.bytes / rates["copy"],
        }
        if not isinstance(each.steps, Graph):
            continue
        try:
            results[name] |= kernels_of(each.steps)
        except Exception as error:  # a profiler that fails must not take the times with it
            print(f"kernels of {name} could not be counted: {error}", flush=True)
            continue
        results[name]["starts_microseconds"] = 1e6 * empty * results[name]["kernels"]
    return results


def show_floors(
    results: dict[str, dict[str, Any]],
    steps: dict[str, Any],
    rates: dict[str, float],
    empty: float,
) -> None:
    flops = ", ".join(f"{name} {rates[name] / 1e12:.1f}" for name in rates if name != "copy")
    print(f"floors: copies {rates['copy'] / 1e12:.2f} TB/s; {flops} TFLOP/s;")
    print(f"an empty kernel in a graph {1e6 * empty:.2f} µs. µs per step, all seeds together")
    print(
        f"{'case':18}{'step':>8}{'kernels':>8}{'busy':>7}{'flop':>8}{'bytes':>8}"
        f"{'starts':>8}{'/floor':>7}{'/starts':>8}"
    )
    for name, result in results.items():
        step = steps[name]["median_microseconds"]
        floor = max(result["arithmetic_microseconds"], result["memory_microseconds"])
        starts = result.get("starts_microseconds")
        counted = [
            f"{result[key]:.0f}" if result.get(key) else "–"
            for key in ("kernels", "busy_microseconds", "starts_microseconds")
        ]
        print(
            f"{name:18}{step:8.1f}{counted[0]:>8}{counted[1]:>7}"
            f"{result['arithmetic_microseconds']:8.2f}{result['memory_microseconds']:8.2f}"
            f"{counted[2]:>8}{step / floor:7.1f}"
            f"{f'{step / starts:.2f}' if starts else '–':>8}"
        )
    print(flush=True)


def all_steps(options: argparse.Namespace, write: "Write") -> None:
    rates, empty = ceilings(options), empty_kernel(options)
    write({"ceilings": rates | {"empty_kernel_microseconds": 1e6 * empty}})
    learning = {}
    for name, case in CASES.items():
        try:
            learning[name] = started(case, options)
        except Exception as error:  # one that cannot begin must not take the others with it
            print(f"{name} could not be started: {error}", flush=True)
    steps = step_times(learning, options)
    show_steps(steps, options.device)
    write({"steps": steps})
    # Last: a profiler that was there once may slow down what comes after it.
    found = floors(learning, rates, empty)
    show_floors(found, steps, rates, empty)
    write({"floors": found})


Write = Callable[[dict[str, Any]], Path]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [*RUNS, "steps"]
    parser.add_argument("--only", default=",".join(known), help=f"some of {','.join(known)}")
    parser.add_argument("--repeats", type=int, default=9, help="epochs of steps")
    parser.add_argument("--runs", type=int, default=1, help="times that a whole run is repeated")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny numbers, to see that it works")
    parser.add_argument("--data", type=Path, help="where data sets are, else $RANKUP_DATA")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := set(names) - set(known):
        parser.error(f"there is no {', '.join(sorted(unknown))}, only {', '.join(known)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --device cpu --small only tries the script")
    torch.set_num_threads(options.threads)

    def write(measured: dict[str, Any]) -> Path:
        name = "gpu-small" if options.small else "gpu"
        return write_result(
            name, measured, threads=f"{options.threads}", folder=options.out, merge=True
        )

    # Runs come first, while this process holds nothing of the GPU.
    runs = [name for name in RUNS if name in names]
    whole = whole_runs(runs, options, write) if runs else True
    if "steps" in names:
        all_steps(options, write)
    print(f"written to {write({})}")
    sys.exit(0 if whole else 1)


if __name__ == "__main__":
    main()

"""Whole runs from the command line: their time and accuracy against their bars."""

import argparse
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

import rankup

SMALL = "--epochs 5 --tasks 5 --width 16"

Write = Callable[[dict[str, Any]], Path]


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
    """Seconds that the command takes, and what it prints."""
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
    """Each seed's accuracy after its last task, in per cent."""
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
    """Do a tiny run for every stream that will be used."""
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


def whole_runs(names: list[str], options: argparse.Namespace, write: Write) -> bool:
    """Run them; return whether all of them finished."""
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

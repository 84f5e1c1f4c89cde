"""Steps of networks that already know tasks, and their time compared with the paper notebook's."""

import argparse
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from common import device_name
from notebook import notebook
from steps import Epoch, Learning, begin, knowing, measure, random_task

import rankup
from rankup.data.tasks import Task
from rankup.training.recipe import Recipe, recipe_for


@dataclass(frozen=True)
class Case:
    net: str
    rank: rankup.Rank
    seeds: int
    tasks: int  # committed before the one being learned
    classes: int
    shape: tuple[int, ...]
    samples: int
    width: int = 20  # of ResNet18

    def module(self) -> torch.nn.Module:
        if self.net == "mlp":
            return rankup.models.mlp(784)
        return rankup.models.resnet18(width=self.width)

    def recipe(self) -> Recipe:
        return recipe_for(
            "default",
            colour=self.net == "resnet18",
            size=self.shape[-1],
            samples=self.samples,
            net=self.net,
            learns_factors=bool(self.rank.first),
            device="cuda",
        )


def mlp(seeds: int, rank: rankup.Rank) -> Case:
    return Case("mlp", rank, seeds, 10, 10, (1, 28, 28), 60_000)


def resnet(seeds: int, rank: rankup.Rank | None = None, width: int = 20) -> Case:
    rank = rank or rankup.Rank.proportional(0.1, 0.02)
    return Case("resnet18", rank, seeds, 9, 5, (3, 32, 32), 2_500, width)


_GROWING, _CHOOSING = rankup.Rank(11, 1), rankup.Rank(0, 0, seeded=[1536, 768])
CASES = {
    "mlp": mlp(1, _GROWING),
    "mlp, 5 seeds": mlp(5, _GROWING),
    "mlp, 32 seeds": mlp(32, _GROWING),
    "seeded, 5 seeds": mlp(5, _CHOOSING),
    "resnet18": resnet(1),
    "resnet18, 5 seeds": resnet(5),
    "our best, 5 seeds": resnet(5, rankup.Rank(8, 1, seeded="16x"), width=64),
}
FACTORS = 21  # per layer: 20 of ten tasks, and the one being learned


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

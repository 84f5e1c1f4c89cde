"""Shared by the benchmarks of steps: networks that know tasks, and epochs as in `fit`."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from common import wait

import rankup
from rankup.data.tasks import Task
from rankup.training.engine.cuda_graph import Graph
from rankup.training.engine.eager import Steps
from rankup.training.engine.select import Engine
from rankup.training.fit import NetPupil
from rankup.training.recipe import Recipe

_EAGER = 100  # steps in an epoch that is run step by step

Epoch = Callable[[], int]  # returns how many steps it took


def random_task(shape: Sequence[int], classes: int, samples: int) -> Task:
    """A task of random images: their content does not affect the time of a step."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (samples, *shape), generator=draw, dtype=torch.uint8)
    y = torch.arange(samples) % classes
    return Task("measured", classes, x, y, x[:100], y[:100])


def knowing(
    module: torch.nn.Module, rank: rankup.Rank, tasks: int, task: Task, seed: int, device: str
) -> rankup.IncrementalNet:
    """A network that knows `tasks` tasks, left as initialised: no step's time depends on values."""
    net = rankup.grow(module.to(device), rank, seed=seed)
    few = [rankup.data.to_float(task.train_x[:8]).to(device)]
    for index in range(tasks):
        net.begin_task(f"{index}", task.classes)
        net.commit_task(calibrate=few)
    return net


@dataclass
class Learning:
    """Networks in the middle of a task."""

    pupils: list[NetPupil]
    steps: Steps
    capture: float  # seconds until the first step can be taken
    notes: list[str]

    @property
    def form(self) -> str:
        return self.steps.form if isinstance(self.steps, Graph) else "eager"

    def epoch(self) -> int:
        """An epoch as in `fit`: everything random is drawn, and the losses are read. Where steps
        are slow, it is short."""
        steps = self.steps.learners[0].feed.steps_per_epoch
        draws = [
            learner.sample_epoch(torch.Generator(learner.feed.device).manual_seed(pupil.seed))
            for pupil, learner in zip(self.pupils, self.steps.learners, strict=True)
        ]
        if not isinstance(self.steps, Graph) and steps > _EAGER:
            steps = _EAGER
            draws = [{name: t[:steps] for name, t in drawn.items()} for drawn in draws]
        self.steps.epoch(draws, [[1e-4] * steps] * len(draws), 0).tolist()
        return steps


def begin(
    nets: Sequence[rankup.IncrementalNet], task: Task, recipe: Recipe, device: str
) -> Learning:
    pupils = [NetPupil(net, recipe, seed) for seed, net in enumerate(nets)]
    learners = [pupil.begin(task) for pupil in pupils]
    notes: list[str] = []
    wait(device)
    started = time.perf_counter()
    steps = Engine(notes.append).start(learners)
    wait(device)
    return Learning(pupils, steps, time.perf_counter() - started, notes)


def measure(epochs: dict[str, Epoch], repeats: int, device: str) -> dict[str, list[float]]:
    """Microseconds per step, the candidates taking turns so that all see the same machine."""
    times: dict[str, list[float]] = {name: [] for name in epochs}
    for repeat in range(-1, repeats):
        for name, epoch in epochs.items():
            wait(device)
            started = time.perf_counter()
            steps = epoch()
            wait(device)
            if repeat >= 0:  # the first round warms up
                times[name].append((time.perf_counter() - started) / steps * 1e6)
    return times

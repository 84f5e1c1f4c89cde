"""How far steps are from what the machine allows: its rates, and what a step needs of them."""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import wait
from gpu_steps import CASES
from steps import Learning
from theory import Need, step_needs
from torch import Tensor
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from rankup.training.engine.cuda_graph import Graph
from rankup.training.engine.mlp import ChainLearner

REPLAYS = 10  # of a graph to count its kernels
EMPTY = 100  # kernels that do nothing, in one graph


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
    """Bytes per second read and written by a large copy, and FLOP/s of large matrix products."""
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
    """Seconds for a kernel in a graph that does next to nothing."""
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
    """How many kernels a replay starts, including copies, and the sum of their times, which is more
    than the elapsed time where they run side by side."""
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
        projected=isinstance(learner, ChainLearner) and learner.projections is not None,
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
        except Exception as error:  # a failing profiler must not cost the times
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

"""Samples per second of batches in which every sample names its task: ours in one pass, ours for
one task, ours task after task, and PEFT's LoRA adapters. Medians over repeats, all taking turns.

    python benchmarks/mixed.py            # a table, and a dated JSON in benchmarks/results

"Eager" is the network called as usual, with its indices checked; "graph" is a CUDA graph of the
same call. PEFT is measured if it is installed.
"""

import argparse
import importlib.util
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, write_result
from torch import Tensor

import rankup

CLASSES, LORA_RANK = 10, 11
PATIENCE = 60.0  # seconds for adding PEFT's adapters
Call = Callable[[], object]
Rates = dict[str, list[float]]


@dataclass(frozen=True)
class Case:
    model: str
    tasks: int
    growth: str
    rank: rankup.Rank

    def module(self) -> torch.nn.Module:
        return rankup.models.mlp(784) if self.model == "mlp" else rankup.models.resnet18(width=20)

    def inputs(self, batch: int) -> Tensor:
        shape = (784,) if self.model == "mlp" else (3, 32, 32)
        return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0))


# A thousand tasks that each add a factor would have more of them than a layer has numbers to make
# of them; who has so many lets them share what the first learned, or seeded factors.
PAPER, SHARED = rankup.Rank(first=11, step=1), rankup.Rank(first=11, step=0)
SEEDED = rankup.Rank(first=0, step=0, seeded=[1024, 1024])
SHARES = rankup.Rank.proportional(0.1, 0.02)
CASES = [
    *(Case("mlp", tasks, "11, 1", PAPER) for tasks in (1, 20, 100)),
    Case("mlp", 1000, "11, 0", SHARED),
    Case("mlp", 1000, "seeded", SEEDED),
    *(Case("resnet18", tasks, "0.1, 0.02", SHARES) for tasks in (1, 20, 100)),
]


def learned(case: Case, device: torch.device) -> rankup.IncrementalNet:
    """A network that knows its tasks. They are random, which makes no difference in speed."""
    net = rankup.grow(case.module().to(device), case.rank)
    few = [case.inputs(4).to(device)] if case.model == "resnet18" else None
    for task in range(case.tasks):
        net.begin_task(f"{task}", CLASSES)
        net.commit_task(calibrate=few)
    return net.eval()


def task_after_task(net: rankup.IncrementalNet, x: Tensor, tasks: Tensor) -> Tensor:
    answers = x.new_empty(len(x), CLASSES)
    counts = torch.bincount(tasks, minlength=len(net.tasks)).tolist()
    for task, rows in enumerate(tasks.argsort().split(counts)):
        if len(rows):
            answers[rows] = net(x[rows], task=task)
    return answers


def ours(case: Case, x: Tensor, batches: list[Tensor]) -> dict[str, Call]:
    net, last = learned(case, x.device), case.tasks - 1
    turn = itertools.cycle(batches)
    calls: dict[str, Call] = {
        "mixed": lambda: net(x, task=next(turn)),
        "one task": lambda: net(x, task=last),
        "task after task": lambda: task_after_task(net, x, next(turn)),
    }
    if x.is_cuda:
        calls["mixed, graph"] = captured(lambda: net(x, task=batches[0]))
        calls["one task, graph"] = captured(lambda: net(x, task=last))
    return calls


def captured(call: Call) -> Call:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = call()
    return lambda: (graph.replay(), answer)  # the output must live as long as the graph


def peft_lora(case: Case, x: Tensor, batches: list[Tensor]) -> dict[str, Call] | str:
    """A LoRA adapter per task on every layer of the same module, or why there is none."""
    if importlib.util.find_spec("peft") is None:
        return "PEFT is not installed"
    import peft

    def config() -> Any:
        layers = ["hidden.0", "hidden.1", "head"]
        return peft.LoraConfig(r=LORA_RANK, target_modules=layers, init_lora_weights=False)

    model: Any = peft.get_peft_model(case.module().to(x.device), config(), adapter_name="0")
    started = time.perf_counter()
    for task in range(1, case.tasks):
        model.add_adapter(f"{task}", config())
        if time.perf_counter() - started > PATIENCE:
            return f"PEFT: {task} of {case.tasks} adapters took {PATIENCE:.0f} s to add"
    model.to(x.device).eval()
    turn = itertools.cycle([[f"{task}" for task in tasks.tolist()] for tasks in batches])
    return {"PEFT": lambda: model(x, adapter_names=next(turn))}


def measure(calls: dict[str, Call], batch: int, repeats: int, seconds: float) -> Rates:
    """Samples per second, the candidates taking turns so that all see the same machine."""
    rates: Rates = {name: [] for name in calls}
    for call in calls.values():
        timed(call, 1)  # warms up
    often = {name: max(1, int(seconds / timed(call, 1))) for name, call in calls.items()}
    for _ in range(repeats):
        for name, call in calls.items():
            rates[name].append(batch * often[name] / timed(call, often[name]))
    return rates


def timed(call: Call, times: int) -> float:
    wait()
    started = time.perf_counter()
    for _ in range(times):
        call()
    wait()
    return time.perf_counter() - started


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measured(options: argparse.Namespace) -> Iterator[tuple[Case, Rates, str | None]]:
    device = torch.device(options.device)
    draw = torch.Generator().manual_seed(1)
    for case in CASES:
        if case.model not in options.models or case.tasks not in options.tasks:
            continue
        x = case.inputs(options.batch).to(device)
        batches = [
            torch.randint(case.tasks, (options.batch,), generator=draw).to(device) for _ in range(4)
        ]
        calls, note = ours(case, x, batches), None
        if case.model == "mlp" and case.growth != "seeded":
            lora = peft_lora(case, x, batches)
            if isinstance(lora, str):
                note = lora
            else:
                calls |= lora
        yield case, measure(calls, options.batch, options.repeats, options.seconds), note


def show(values: dict[str, float], name: str) -> str:
    if name not in values:
        return "–"
    thousands = values[name] / 1000
    return f"{thousands:,.0f}" if thousands >= 100 else f"{thousands:.1f}"


def ratio(values: dict[str, float], mixed: str, one: str) -> str:
    return f"{values[mixed] / values[one]:.2f}" if mixed in values else "–"


def line(case: Case, medians: dict[str, float]) -> str:
    eager = [show(medians, name) for name in ("mixed", "one task")]
    loop, peft = show(medians, "task after task"), show(medians, "PEFT")
    graph = [show(medians, name) for name in ("mixed, graph", "one task, graph")]
    return "".join(
        [
            f"{case.tasks:5} {case.growth:10}",
            f"{eager[0]:>8}{eager[1]:>9}",
            f"{ratio(medians, 'mixed', 'one task'):>6}{loop:>8}{peft:>7}",
            f"{graph[0]:>8}{graph[1]:>9}",
            f"{ratio(medians, 'mixed, graph', 'one task, graph'):>6}",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.1, help="about how long a repeat takes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", default=["mlp", "resnet18"])
    parser.add_argument("--tasks", nargs="+", type=int, default=[1, 20, 100, 1000])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", module="peft")
    on_gpu = torch.device(options.device).type == "cuda"
    device = torch.cuda.get_device_name(options.device) if on_gpu else "CPU"
    results: dict[str, Any] = {}
    notes: list[str] = []
    heading = f"{'tasks':>5} {'rank':10}{'mixed':>8}{'one task':>9}{'ratio':>6}{'in turn':>8}"
    print(f"batch {options.batch:,}, {device}: thousand samples per second")
    print(f"{'':16}{'eager':>8}{'':30}{'graph':>8}")
    print(f"{heading}{'PEFT':>7}{'mixed':>8}{'one task':>9}{'ratio':>6}")
    model = ""
    with torch.no_grad():
        for case, rates, note in measured(options):
            if case.model != model:
                model = case.model
                print(model)
            medians = {name: statistics.median(values) for name, values in rates.items()}
            print(line(case, medians), flush=True)
            notes += [note] if note else []
            key = f"{case.model}, {case.tasks} tasks, rank {case.growth}"
            results[key] = {"samples_per_second": rates, "medians": medians, "note": note}
    for note in dict.fromkeys(notes):
        print(note)
    found = importlib.util.find_spec("peft") is not None
    path = write_result(
        "mixed",
        {"device": device, "batch": options.batch, "measured": results},
        threads=f"{options.threads}",
        versions={"peft": version("peft")} if found else None,
        folder=options.out,
    )
    print(f"written to {path}")


if __name__ == "__main__":
    main()

"""What a growing number of tasks costs: the time of a training step, a network's working memory and
its folder on disk, from the second task to the two-hundredth, compared with theory.

    python benchmarks/growth.py         # a table, and a dated JSON in benchmarks/results

The network is the paper's MLP, in which every task adds a factor per layer. Tasks are committed
without training: the time of a step does not depend on values. Steps of the task being learned run
in a CUDA graph on a GPU and one by one on the CPU; medians over epochs, all sizes taking turns.
"""

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, device_name, wait, write_result
from steps import Learning, begin, knowing, measure, random_task
from theory import step_needs

import rankup
from rankup.data.tasks import Task
from rankup.training.recipe import recipe_for

FIRST, STEP = 11, 1
PIXELS, HIDDEN, CLASSES, BATCH = 784, 256, 10, 128
BAR, MOONSHOT = 2.0, 1.2  # the last step's time over the first's
MB = 1e6


def stored_by_theory(tasks: int) -> int:
    """Factors of both layers, heads, biases, and each task's selectors over all factors so far."""
    factors = (FIRST + STEP * (tasks - 1)) * (PIXELS + HIDDEN + HIDDEN + HIDDEN)
    heads, biases = tasks * (HIDDEN * CLASSES + CLASSES), tasks * 2 * HIDDEN
    return factors + heads + biases + 2 * sum(FIRST + STEP * task for task in range(tasks))


def multiplications(net: rankup.IncrementalNet, task: Task) -> int:
    """The multiplications in a step of the task being learned."""
    module = rankup.models.mlp(PIXELS, hidden=[HIDDEN, HIDDEN])
    needs = step_needs(net, module, task.train_x[0], BATCH, projected=True, width=4)
    return needs.multiplications


def allocated(device: str) -> int:
    gc.collect()
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def started(tasks: int, task: Task, device: str) -> tuple[Learning, dict[str, Any]]:
    """A network in the middle of its last task, and what was measured so far."""
    before = allocated(device)
    module = rankup.models.mlp(PIXELS, hidden=[HIDDEN, HIDDEN])
    net = knowing(module, rankup.Rank(FIRST, STEP), tasks - 1, task, 0, device)
    learning = begin([net], task, recipe_for("default", device=device), device)
    facts: dict[str, Any] = {
        "form": learning.form,
        "notes": learning.notes,
        "capture_seconds": learning.capture,
        "multiplications": multiplications(net, task),
    }
    if device == "cuda":
        facts["allocated_bytes"] = allocated(device) - before
    return learning, facts


def footprint(net: rankup.IncrementalNet) -> dict[str, int]:
    """The sizes of a network whose last task is committed."""
    tensors = [*net.parameters(), *net.buffers()]
    with tempfile.TemporaryDirectory() as folder:
        rankup.save(net, Path(folder) / "net")
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
    return {
        "working_bytes": sum(t.numel() * t.element_size() for t in tensors),
        "folder_bytes": size,
        "stored": net.size().total,
        "stored_by_theory": stored_by_theory(len(net.tasks)),
    }


def grown(sizes: list[int], samples: int, repeats: int, device: str) -> dict[str, Any]:
    task = random_task((1, 28, 28), CLASSES, samples).to(device)
    learning, facts = {}, {}
    for size in sizes:
        learning[f"{size}"], facts[f"{size}"] = started(size, task, device)
    times = measure({name: each.epoch for name, each in learning.items()}, repeats, device)
    for name, each in learning.items():
        net = each.pupils[0].net
        net.commit_task()
        facts[name] |= footprint(net) | {
            "microseconds": times[name],
            "median_microseconds": statistics.median(times[name]),
        }
    return facts


def show(device: str, facts: dict[str, Any]) -> float:
    """Print a device's table; return the last step's time over the first's."""
    sizes = list(facts)
    first, last = facts[sizes[0]], facts[sizes[-1]]
    form = "CUDA graph" if last["form"] != "eager" else "eager"
    print(f"{device_name(device)}, {form}: the step of task t, memory and folder of t tasks")
    print(
        f"{'t':>5}{'µs/step':>9}{'ratio':>7}{'mult.':>8}{'ratio':>7}{'working':>9}"
        f"{'on GPU':>8}{'folder':>8}{'stored':>9}{'theory':>9}"
    )
    for size, fact in facts.items():
        on_gpu = f"{fact['allocated_bytes'] / MB:.0f} MB" if "allocated_bytes" in fact else "–"
        print(
            f"{size:>5}{fact['median_microseconds']:9.1f}"
            f"{fact['median_microseconds'] / first['median_microseconds']:7.2f}"
            f"{fact['multiplications'] / 1e6:7.1f}M"
            f"{fact['multiplications'] / first['multiplications']:7.2f}"
            f"{fact['working_bytes'] / MB:6.2f} MB"
            f"{on_gpu:>8}"
            f"{fact['folder_bytes'] / MB:5.2f} MB"
            f"{fact['stored']:>9,}{fact['stored_by_theory']:>9,}"
        )
    ratio = float(last["median_microseconds"] / first["median_microseconds"])
    verdict = "moonshot" if ratio <= MOONSHOT else "met" if ratio <= BAR else "missed"
    print(
        f"step({sizes[-1]}) / step({sizes[0]}) = {ratio:.2f}: bar ≤ {BAR}, moonshot ≤ {MOONSHOT}, "
        f"{verdict}"
    )
    for note in dict.fromkeys(note for fact in facts.values() for note in fact["notes"]):
        print(f"note: {note}")
    print(flush=True)
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", type=int, default=[2, 25, 50, 100, 150, 200])
    parser.add_argument("--samples", type=int, default=60_000, help="in a task")
    parser.add_argument("--repeats", type=int, default=5, help="epochs on a GPU")
    parser.add_argument("--cpu-repeats", type=int, default=7, help="epochs on the CPU")
    both = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    parser.add_argument("--devices", nargs="+", choices=["cuda", "cpu"], default=both)
    parser.add_argument("--threads", type=int, default=min(2, torch.get_num_threads()))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    began = time.perf_counter()
    results: dict[str, Any] = {}
    for device in options.devices:
        repeats = options.repeats if device == "cuda" else options.cpu_repeats
        facts = grown(sorted(options.tasks), options.samples, repeats, device)
        results[device] = {"by_tasks": facts, "ratio": show(device, facts)}
        wait(device)
        path = write_result(
            "growth", results, threads=f"{options.threads}", folder=options.out, merge=True
        )
    print(f"{time.perf_counter() - began:.0f} s in all, written to {path}")


if __name__ == "__main__":
    main()

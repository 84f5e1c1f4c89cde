"""Ten tasks learned at once on one kept base, against one after another, in one run.

    python benchmarks/together.py                         # small models, on the CPU
    python benchmarks/together.py --device cuda           # MiniLM's and ViT-B/16's sizes
    python benchmarks/together.py --minilm PATH --data DATA --device cuda   # accuracy, too

Times are of random data and weights: the whole of learning, with what comes before and after the
steps, and of an epoch alone once the first is over. With a folder of MiniLM and one that holds
CLINC150, every domain of it is learned alone and with the nine others, and tested.
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, wait, write_result
from torch import Tensor, nn

import rankup

TASKS, CLASSES = 10, 10
RANK = rankup.Rank(first=4, step=1)


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    samples: Callable[[int], Tensor]  # so many inputs
    batches: tuple[int, ...]  # samples of a task in a step
    steps: int  # of an epoch
    precision: Any = "float32"


def bert(hidden: int, layers: int, heads: int, vocabulary: int) -> nn.Module:
    from rankup.models import from_hf

    config = {
        "model_type": "bert",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "vocab_size": vocabulary,
    }
    return from_hf.make({"config": config, "kind": "text", "head": "mean", "pad": 0})


def tokens(vocabulary: int, length: int) -> Callable[[int], Tensor]:
    return lambda count: torch.randint(1, vocabulary, (count, length))


def photos(side: int) -> Callable[[int], Tensor]:
    return lambda count: torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8)


def cases(device: str) -> list[Case]:
    if device == "cpu":
        small = {"vocabulary": 1000, "hidden": 64, "layers": 2, "heads": 4}
        return [
            Case("MLP of 784, 256, 256", lambda: rankup.models.mlp(784), numbers(784), (8, 32), 20),
            Case("BERT of 64 × 2", lambda: bert(**small), tokens(1000, 16), (8, 32), 10),
        ]
    from rankup.models import timm

    minilm = {"vocabulary": 30522, "hidden": 384, "layers": 6, "heads": 12}
    return [
        Case("MiniLM, 24 tokens", lambda: bert(**minilm), tokens(30522, 24), (8, 64), 20, p)
        for p in ("tf32", "bfloat16")
    ] + [
        Case(
            "ViT-B/16, 224 pixels",
            lambda: timm("vit_base_patch16_224", num_classes=CLASSES),
            photos(224),
            (4, 16, 64),
            4,
            "bfloat16",
        )
    ]


def numbers(length: int) -> Callable[[int], Tensor]:
    return lambda count: torch.rand(count, length)


def random_tasks(case: Case, batch: int) -> list[rankup.Task]:
    """Tasks of which a part can be learned, as those that cannot be would not be kept."""
    torch.manual_seed(0)
    made = []
    for number in range(TASKS):
        x, y = case.samples(batch * case.steps), torch.arange(batch * case.steps) % CLASSES
        made.append(rankup.Task(f"task {number}", CLASSES, x, y, x[:CLASSES], y[:CLASSES]))
    return made


class Watch:
    """Seconds of a whole run, and of an epoch of all tasks after the first."""

    def __init__(self, device: str) -> None:
        self.device, self.ends = device, dict[tuple[Any, int], float]()

    def epoch(self, name: object, epoch: rankup.Epoch) -> None:
        """Called at the end of an epoch of a task."""
        wait(self.device)
        self.ends[name, epoch.number] = time.perf_counter()

    def steady(self, epochs: int, at_once: bool) -> float:
        def last(number: int) -> list[float]:
            return [end for (_, each), end in self.ends.items() if each == number]

        pairs = zip(last(1), last(epochs), strict=True)
        spans = [(end - start) / (epochs - 1) for start, end in pairs]
        return max(spans) if at_once else sum(spans)


def one_after_another(
    net: rankup.IncrementalNet, tasks: list[rankup.Task], recipe: rankup.Recipe, watch: Watch
) -> None:
    for task in tasks:
        # Random labels are hard to learn; the time is the same.
        with contextlib.suppress(rankup.TaskFailed):
            rankup.fit(
                net, task, recipe, uses="own", on_epoch=lambda e, _, t=task: watch.epoch(t.name, e)
            )


def at_once(
    net: rankup.IncrementalNet, tasks: list[rankup.Task], recipe: rankup.Recipe, watch: Watch
) -> None:
    rankup.fit_together(net, tasks, recipe, on_epoch=watch.epoch)


def seconds(
    case: Case, module: nn.Module, batch: int, epochs: int, device: str, both: bool
) -> dict[str, float]:
    """Of the whole, of a later epoch, and of what is before and after all but the first epoch."""
    tasks = [task.to(torch.device(device)) for task in random_tasks(case, batch)]
    recipe = rankup.Recipe(epochs=epochs, batch=batch, lr=1e-3, precision=case.precision)
    net = rankup.grow(module, RANK, base="keep").to(device)
    watch = Watch(device)
    wait(device)
    began = time.perf_counter()
    (at_once if both else one_after_another)(net, tasks, recipe, watch)
    wait(device)
    whole, epoch = time.perf_counter() - began, watch.steady(epochs, both)
    return {"whole": whole, "epoch": epoch, "apart from epochs": whole - epochs * epoch}


def measure_times(
    chosen: list[Case], batches: list[int], device: str, epochs: int, repeats: int
) -> Iterator[dict[str, Any]]:
    for case in chosen:
        module = case.make()
        for batch in batches or case.batches:
            found: dict[str, list[dict[str, float]]] = {"one by one": [], "at once": []}
            try:
                for _ in range(repeats):
                    for name, runs in found.items():
                        runs.append(seconds(case, module, batch, epochs, device, name == "at once"))
            except torch.OutOfMemoryError:
                print(f"{case.name}, batch {batch}: too large for this device")
                torch.cuda.empty_cache()
                continue
            row: dict[str, Any] = {
                "model": case.name,
                "precision": case.precision,
                "batch of each task": batch,
                "steps": case.steps * epochs,
            }
            for what in ("whole", "epoch", "apart from epochs"):
                each = {
                    name: statistics.median(run[what] for run in runs)
                    for name, runs in found.items()
                }
                ratio = each["at once"] / each["one by one"]
                row[what] = {name: round(value, 4) for name, value in each.items()}
                row[what]["ratio"] = round(ratio, 3)
            if device.startswith("cuda"):
                row["peak GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
                torch.cuda.reset_peak_memory_stats()
            print(row, flush=True)
            yield row


def measure_accuracy(
    minilm: Path,
    data: Path,
    device: str,
    seeds: int,
    epochs: int,
    per_class: int | None,
    precision: Any,
) -> dict[str, Any]:
    module = rankup.models.hf(minilm)
    recipe = rankup.Recipe(epochs=epochs, batch=64, lr=1e-3, weight_decay=0.01, precision=precision)
    rows = []
    for seed in range(seeds):
        stream = rankup.data.make_stream(
            "split:clinc150",
            data=data,
            seed=seed,
            inputs=rankup.models.inputs_of(module),
            per_class=per_class,
            progress=False,
        )
        tasks = [task.to(torch.device(device)) for task in stream]
        alone, both = (
            rankup.grow(module, RANK, base="keep", seed=seed).to(device) for _ in range(2)
        )
        wait(device)
        began = time.perf_counter()
        for task in tasks:
            rankup.fit(alone, task, recipe, uses="own")
        wait(device)
        middle = time.perf_counter()
        failed = rankup.fit_together(both, tasks, recipe)
        wait(device)
        took = [middle - began, time.perf_counter() - middle]
        assert not failed, failed
        found = {task.name: _of(task, alone, both) for task in tasks}
        print(seed, _means(list(found.values())), [round(each, 1) for each in took], flush=True)
        rows.append({"seconds": [round(each, 2) for each in took], "tasks": found})
    return _summary(rows) | {"seeds": rows}


def _of(task: rankup.Task, *nets: rankup.IncrementalNet) -> list[float]:
    return [round(100 * rankup.accuracy(net, task), 3) for net in nets]


def _means(pairs: list[list[float]]) -> list[float]:
    return [round(statistics.mean(each), 2) for each in zip(*pairs, strict=True)]


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Accuracy alone and together in percent, and how far they are apart, over all seeds."""
    by_task = {
        name: statistics.mean(row["tasks"][name][1] - row["tasks"][name][0] for row in rows)
        for name in rows[0]["tasks"]
    }
    differences = [both - alone for row in rows for alone, both in row["tasks"].values()]
    deviation = statistics.stdev(differences) if len(differences) > 1 else 0.0
    summary = {
        "alone, together": _means([pair for row in rows for pair in row["tasks"].values()]),
        "difference": round(statistics.mean(differences), 3),
        "its standard error": round(deviation / len(differences) ** 0.5, 3),
        "by task, mean over seeds": {k: round(v, 2) for k, v in sorted(by_task.items())},
        "seconds": _means([row["seconds"] for row in rows]),
    }
    print(summary)
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=5, help="of the timed runs")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--models", default="", help="of those timed, whose name begins so")
    parser.add_argument("--batches", type=int, nargs="*", help="of each task in the timed runs")
    parser.add_argument("--precision", help="of the timed models, or of MiniLM's accuracy")
    parser.add_argument("--minilm", type=Path, help="a folder of MiniLM")
    parser.add_argument("--data", type=Path, help="the folder that holds clinc150")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--accuracy-epochs", type=int, default=5)
    parser.add_argument("--per-class", type=int)
    parser.add_argument("--only", choices=("times", "accuracy"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    measured: dict[str, Any] = {"tasks": TASKS, "rank": RANK.first}
    if options.only != "accuracy":
        chosen = [
            case
            for case in cases(options.device)
            if case.name.startswith(options.models) and options.precision in (None, case.precision)
        ]
        timed = chosen, options.batches, options.device, options.epochs, options.repeats
        measured["times"] = list(measure_times(*timed))
    if options.minilm is not None and options.only != "times":
        measured["accuracy"] = measure_accuracy(
            options.minilm,
            options.data,
            options.device,
            options.seeds,
            options.accuracy_epochs,
            options.per_class,
            options.precision or "float32",
        )
    threads = str(torch.get_num_threads())
    print(write_result("together", measured, threads=threads, folder=options.out))


if __name__ == "__main__":
    main()

"""A pretrained ViT that learns task after task: a training step, its memory, and answers, beside
PEFT's LoRA of the same rank and full fine-tuning, and the ratios that are aimed at.

    python benchmarks/pretrained_steps.py --out steps.json     # a GPU: ViT-B, batch 64, bfloat16
    python benchmarks/pretrained_steps.py --small --out x.json # a CPU: ViT-Ti, two samples

Weights are random: no figure depends on them. Every part stands by itself and the file is written
after each, so that one that fails or does not fit into `--seconds` loses nothing else. What is
compared is timed in one process; times are medians.
"""

import argparse
import contextlib
import gc
import json
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from mixed import captured
from torch import nn
from torch._dynamo.utils import counters

import rankup
from rankup.net.network import IncrementalNet
from rankup.training.engine.select import Engine
from rankup.training.fit import NetPupil

CLASSES, RANK = 10, 8
TASKS = (1, 6, 21)  # at which a step is measured
COMPILED = (1, 21)  # the same under torch.compile, which takes longer
MANY = (20, 100)  # tasks in a mixed batch
ADAPTED = ["qkv", "proj", "fc1", "fc2"]
SHARED = ["cls_token", "pos_embed", "patch_embed*"]  # PEFT leaves them alone, too

Call = Callable[[], object]


@dataclass
class Bench:
    """What all parts use, and what they have found."""

    device: str
    model: str
    batch: int
    repeats: int
    vectors: str
    deadline: float
    found: dict[str, dict[str, float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.x = torch.randn(self.batch, 3, 224, 224, device=self.device)
        self.y = torch.randint(CLASSES, (self.batch,), device=self.device)

    def module(self) -> nn.Module:
        import timm

        torch.manual_seed(0)
        made: nn.Module = timm.create_model(self.model, num_classes=CLASSES)
        return made.to(self.device)

    def note(self, part: str, **numbers: float) -> None:
        self.found.setdefault(part, {}).update(numbers)
        print(part, {key: round(number, 2) for key, number in numbers.items()}, flush=True)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        return torch.autocast(self.device, torch.bfloat16)

    def ms(self, call: Call, warm: int = 4, repeats: int | None = None) -> float:
        for _ in range(warm):
            call()
        times = []
        for _ in range(repeats or self.repeats):
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e3

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def mebibytes(self, call: Call) -> float:
        """The most memory while it runs, with all that is held."""
        if self.device != "cuda":
            call()
            return 0.0
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        call()
        self.wait()
        return torch.cuda.max_memory_allocated() / 2**20

    def step(self, module: nn.Module, run: Callable[[], Any]) -> Call:
        """A training step over what learns."""
        learned = [p for p in module.parameters() if p.requires_grad]
        optimiser = torch.optim.AdamW(learned, lr=1e-4, fused=self.device == "cuda")

        def step() -> None:
            with self.autocast():
                loss = F.cross_entropy(run(), self.y)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()

        return step

    def measure_step(self, part: str, module: nn.Module, run: Callable[[], Any]) -> None:
        step = self.step(module.train(), run)
        self.note(part, ms=self.ms(step), mebibytes=self.mebibytes(step))


def full_fine_tuning(bench: Bench) -> None:
    module = bench.module()
    bench.measure_step("full", module, lambda: module(bench.x))


def full_compiled(bench: Bench) -> None:
    module = bench.module()
    compiled = torch.compile(module)
    bench.measure_step("full, compiled", module, lambda: compiled(bench.x))


def adapters(bench: Bench, count: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=ADAPTED, modules_to_save=["head"])
    model = get_peft_model(bench.module(), config, adapter_name="task 0")
    for index in range(1, count):
        model.add_adapter(f"task {index}", config)
    moved: nn.Module = model.to(bench.device)
    return moved


def peft(bench: Bench) -> None:
    model = adapters(bench, 1)
    bench.measure_step("PEFT", model, lambda: model(bench.x))


def peft_compiled(bench: Bench) -> None:
    model = adapters(bench, 1)
    compiled = torch.compile(model)
    bench.measure_step("PEFT, compiled", model, lambda: compiled(bench.x))


def grown(bench: Bench, known: int, rank: int = RANK) -> IncrementalNet:
    rule = rankup.Rank(first=rank, step=rank)
    net = rankup.grow(bench.module(), rule, base="keep", exclude=SHARED, vectors=bench.vectors)
    add_tasks(net, known)
    return net


def add_tasks(net: IncrementalNet, known: int) -> None:
    for index in range(len(net.tasks), known):
        net.begin_task(f"task {index}", CLASSES)
        net.commit_task()


def own_loop(bench: Bench) -> None:
    net = grown(bench, 0)
    for number in TASKS:
        add_tasks(net, number - 1)
        net.train().begin_task("new", CLASSES)
        bench.measure_step(f"ours at {number}", net, lambda: net(bench.x, task="new"))
        net.abandon_task()


def own_loop_compiled(bench: Bench) -> None:
    net = grown(bench, 0)
    for number in COMPILED:
        add_tasks(net, number - 1)
        net.train().begin_task("new", CLASSES)
        compiled = torch.compile(net)
        part = f"ours at {number}, compiled"
        bench.measure_step(part, net, lambda c=compiled: c(bench.x, task="new"))
        net.abandon_task()
        torch._dynamo.reset()


def recompilations(bench: Bench) -> None:
    """How often a shallow network is compiled while it learns 21 tasks, by a backend that does
    nothing: what is counted does not depend on it."""
    import timm

    module = timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES, depth=1, img_size=32)
    net = rankup.grow(module.to(bench.device), rankup.Rank(RANK, RANK), base="keep", exclude=SHARED)
    compiled, x, graphs = torch.compile(net, backend="aot_eager"), bench.x[:, :, :32, :32], []
    counters.clear()
    for index in range(max(TASKS)):
        net.train().begin_task(f"task {index}", CLASSES)
        step = bench.step(net, lambda name=f"task {index}": compiled(x, task=name))
        step()
        step()
        graphs.append(counters["stats"]["unique_graphs"])
        net.commit_task()
    bench.note("graphs", all=graphs[-1], after_task_2=graphs[-1] - graphs[1])


def in_fit(bench: Bench, compiles: bool) -> None:
    """Steps as `fit` takes them, data and all."""
    net = grown(bench, 0)
    for number in COMPILED if compiles else TASKS:
        add_tasks(net, number - 1)
        pupil = NetPupil(net, rankup.Recipe(batch=bench.batch, precision="bfloat16", epochs=1), 0)
        try:
            measure_fit(bench, pupil, number, compiles)
        finally:
            pupil.abandon()


def measure_fit(bench: Bench, pupil: NetPupil, number: int, compiles: bool) -> None:
    samples = 4 * bench.batch
    x = torch.randint(256, (samples, 3, 224, 224), dtype=torch.uint8)
    y = torch.arange(samples) % CLASSES
    task = rankup.data.Task("new", CLASSES, x, y, x[:8], y[:8])
    start, epochs = time.perf_counter(), []

    def begin() -> None:
        learner = pupil.begin(task)
        steps = Engine(compiles=compiles).start([learner])
        draws = [learner.sample_epoch(torch.Generator(bench.device).manual_seed(0))]
        rates = [[1e-4] * learner.feed.steps_per_epoch]
        epochs.append(lambda: steps.epoch(draws, rates, 0))
        epochs[0]()

    held = bench.mebibytes(begin)  # while it is captured: a replay takes no memory of its own
    started = time.perf_counter() - start
    ms = bench.ms(epochs[0], 1) * bench.batch / samples
    how = ", compiled" if compiles else ""
    bench.note(f"ours at {number}, in fit{how}", ms=ms, mebibytes=held, seconds_to_start=started)


@torch.no_grad()
def plain_answers(bench: Bench) -> None:
    module = bench.module().eval()
    with bench.autocast():
        bench.note("answers, plain", ms=bench.ms(lambda: module(bench.x)))
        if bench.device == "cuda":
            bench.note("answers, plain", captured=bench.ms(captured(lambda: module(bench.x))))


@torch.no_grad()
def our_answers(bench: Bench, known: int) -> None:
    net = grown(bench, known, RANK if known <= max(TASKS) else 1).eval()
    tasks = torch.randint(known, (bench.batch,), device=bench.device)
    merged = net.merged(0)
    with bench.autocast():
        bench.note(
            f"answers of {known} tasks, ours",
            merged=bench.ms(lambda: merged(bench.x)),
            first_task=bench.ms(lambda: net(bench.x, task=0)),
            last_task=bench.ms(lambda: net(bench.x, task=known - 1)),
            mixed=bench.ms(lambda: net(bench.x, task=tasks)),
        )
        net.capture()
        bench.note(
            f"answers of {known} tasks, ours",
            mixed_captured=bench.ms(lambda: net(bench.x, task=tasks)),
        )


@torch.no_grad()
def peft_answers(bench: Bench, known: int) -> None:
    model = adapters(bench, known).eval()
    tasks = torch.randint(known, (bench.batch,))
    names = [f"task {int(task)}" for task in tasks]
    with bench.autocast():
        bench.note(
            f"answers of {known} tasks, PEFT",
            one=bench.ms(lambda: model(bench.x)),
            mixed=bench.ms(lambda: model(bench.x, adapter_names=names), 1, 3),
        )


PARTS: dict[str, Callable[[Bench], None]] = {
    "full": full_fine_tuning,
    "peft": peft,
    "ours": own_loop,
    "fit": partial(in_fit, compiles=False),
    "answers-plain": plain_answers,
    **{f"answers-{known}": partial(our_answers, known=known) for known in MANY},
    "peft-compiled": peft_compiled,
    "fit-compiled": partial(in_fit, compiles=True),
    "ours-compiled": own_loop_compiled,
    "recompilations": recompilations,
    **{f"answers-{known}-peft": partial(peft_answers, known=known) for known in MANY},
    "full-compiled": full_compiled,
}


def bars(found: dict[str, dict[str, float]]) -> Iterator[tuple[str, float | None, float]]:
    """What is asked for: a name, what was found, and the most that it may be."""

    def ratio(part: str, key: str, over: str, over_key: str) -> float | None:
        one, other = found.get(part, {}).get(key), found.get(over, {}).get(over_key)
        return one / other if one is not None and other else None

    steps = [(part, found[part]["ms"]) for part in ("PEFT", "PEFT, compiled") if part in found]
    best = min(steps, key=lambda step: step[1], default=("PEFT", 0.0))[0]
    for number, bar in ((1, 0.8), (21, 0.9)):
        part = f"ours at {number}, in fit"
        part = f"{part}, compiled" if f"{part}, compiled" in found else part
        yield f"step in fit at {number} / {best}", ratio(part, "ms", best, "ms"), bar
    for number in COMPILED:
        part = f"ours at {number}, compiled"
        yield (
            f"compiled step at {number} / PEFT compiled",
            ratio(part, "ms", "PEFT, compiled", "ms"),
            1.0,
        )
    yield "graphs compiled after task 2", found.get("graphs", {}).get("after_task_2"), 0.0
    for number, bar in ((1, 0.9), (21, 1.05)):
        yield (
            f"memory at {number} / PEFT",
            ratio(f"ours at {number}", "mebibytes", "PEFT", "mebibytes"),
            bar,
        )
    ours, theirs = "answers of 20 tasks, ours", "answers of 20 tasks, PEFT"
    for key in ("first_task", "last_task"):
        yield f"answers of one task ({key}) / plain", ratio(ours, key, "answers, plain", "ms"), 1.1
    for key, plain in (("mixed", "ms"), ("mixed_captured", "ms"), ("mixed_captured", "captured")):
        what = "plain, captured" if plain == "captured" else "plain"
        yield (
            f"answers of 20 tasks, {key} / {what}",
            ratio(ours, key, "answers, plain", plain),
            1.6,
        )
    yield "the same / PEFT's mixed", ratio(ours, "mixed", theirs, "mixed"), 1 / 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--small", action="store_true", help="a small model on the CPU")
    parser.add_argument("--parts", default=",".join(PARTS), help="which, separated by commas")
    parser.add_argument("--seconds", type=float, default=240.0, help="begin no part after these")
    parser.add_argument(
        "--vectors",
        choices=("shared", "per task"),
        default="shared",
        help="biases and norms: of all tasks, as with LoRA, or learned with each",
    )
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    deadline = time.monotonic() + options.seconds
    if options.small:
        bench = Bench("cpu", "vit_tiny_patch16_224", 2, 1, options.vectors, deadline)
    else:
        bench = Bench("cuda", "vit_base_patch16_224", 64, 10, options.vectors, deadline)
    for name in options.parts.split(","):
        measure(bench, name)
        options.out.write_text(json.dumps(result(bench), indent=1) + "\n")
    for what, value, bar in bars(bench.found):
        met = "" if value is None else "met" if value <= bar else "MISSED"
        print(f"{what:<50} {'-' if value is None else f'{value:.2f}':>8} {bar:>6.2f} {met}")
    for name, reason in bench.failed.items():
        print(f"{name}: {reason}")


def measure(bench: Bench, name: str) -> None:
    if time.monotonic() > bench.deadline:
        bench.failed[name] = "left out: no time left"
        return
    start = time.perf_counter()
    try:
        PARTS[name](bench)
    except Exception as error:
        traceback.print_exc(limit=-6)
        bench.failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    torch._dynamo.reset()
    gc.collect()
    if bench.device == "cuda":
        torch.cuda.empty_cache()
    print(f"  ({name} took {time.perf_counter() - start:.1f} s)", flush=True)


def result(bench: Bench) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if bench.device == "cuda" else "CPU",
        "versions": {name: version(name) for name in ("torch", "timm", "peft")},
        "model": bench.model,
        "batch": bench.batch,
        "vectors": bench.vectors,
        "found": bench.found,
        "failed": bench.failed,
        "bars": [
            {"what": what, "found": value, "bar": bar} for what, value, bar in bars(bench.found)
        ],
    }


if __name__ == "__main__":
    main()

"""Learning a stream with a method, in a run folder from which it can go on at any time.

config.json    what was asked for, enough to repeat it
metrics.jsonl  a line per task learned
net/           what the method knows
checkpoint.safetensors   the task being learned, after its last finished epoch
"""

import json
import os
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import nn

import rankup
from rankup import models
from rankup.data.streams import Stream
from rankup.data.tasks import Task
from rankup.engine import Engine
from rankup.errors import RankupError
from rankup.feed import Feed
from rankup.methods import method_class, method_options
from rankup.methods.base import Method, Setting
from rankup.metrics import AccuracyMatrix
from rankup.plan import Growth
from rankup.rank import Rank
from rankup.recipe import Recipe
from rankup.report.runs import CONFIG, METRICS, NET, read_config
from rankup.store import write_file
from rankup.train import Checkpoint, Epoch, OnEpoch, TaskFailed, accuracy, learn

CHECKPOINT = "checkpoint.safetensors"

_SHARE = 50  # checkpoints, and reports of progress, take at most one part in so many of the time
_TELL = 0.5  # seconds between two reports of progress, at least


class RunError(RankupError):
    """A run folder cannot be used."""


@dataclass(frozen=True)
class RunConfig:
    """What was asked for, as written to `config.json`."""

    stream: str
    method: str
    options: dict[str, Any]  # the method's own
    net: str
    width: int
    rank: str
    seeded: str | None
    tasks: int
    seed: int
    device: str
    threads: int
    recipe: dict[str, Any]
    task_names: list[str]
    versions: dict[str, str]
    held_out: float = 0.0  # share of the training data that stood for the test data

    def but_for_its_seed(self) -> str:
        """What runs have in common that differ in their seeds alone."""
        rest = {k: v for k, v in asdict(self).items() if k not in ("seed", "task_names")}
        return json.dumps(rest, sort_keys=True)


@dataclass(frozen=True)
class Progress:
    """How far a seed is, and with it those that are trained together with it."""

    seed: int
    seeds: int  # how many
    task: int  # its index
    epoch: int  # epochs done
    epochs: int
    loss: float
    accuracy: float  # on a sample of the training data


OnProgress = Callable[[Progress], None]


def run(
    config: RunConfig,
    stream: Stream,
    out: Path,
    *,
    resume: bool = False,
    on_progress: OnProgress | None = None,
) -> None:
    """Learn all tasks of a stream that are not learned yet."""
    failures = run_together([SeedRun(config, stream, out, resume)], on_progress=on_progress)
    for failure in failures.values():
        raise failure


def run_together(
    runs: "Sequence[SeedRun]",
    *,
    on_progress: OnProgress | None = None,
    note: Callable[[str], None] = warnings.warn,
) -> dict[Path, TaskFailed]:
    """Let several runs learn their streams at once, in one process.

    Gives back why runs failed that did, by their folders; the others go on without them.
    """
    torch.set_num_threads(runs[0].config.threads)
    torch.backends.cudnn.deterministic = True  # the same seed, the same numbers
    alike = len({r.config.but_for_its_seed() for r in runs}) == 1
    engine, failures = Engine(note, alike=alike), dict[Path, TaskFailed]()
    while going := [r for r in runs if not r.finished and r.out not in failures]:
        # Runs that were stopped at different tasks catch up first.
        next_task = min(len(r.lines) for r in going)
        failures |= _learn_next(
            [r for r in going if len(r.lines) == next_task], engine, on_progress
        )
    return failures


def _learn_next(
    runs: "Sequence[SeedRun]", engine: Engine, on_progress: OnProgress | None
) -> dict[Path, TaskFailed]:
    started = time.perf_counter()
    learning = [r for r in runs if r.method.learned == len(r.lines)]
    failures: list[TaskFailed | None] = []
    if learning:
        failures = learn(
            [r.method for r in learning],
            [r.next_task for r in learning],
            engine,
            [r.checkpoint() for r in learning],
            # One of them tells of all: telling takes time.
            [r.watch(on_progress if r is learning[0] else None, len(learning)) for r in learning],
        )
    failed = {r.out: why for r, why in zip(learning, failures, strict=True) if why is not None}
    # The time that learning took is lost where a run was stopped just after it. Runs that learn
    # together share it.
    seconds = (time.perf_counter() - started) / len(runs)
    _record([r for r in runs if r.out not in failed], seconds)
    return failed


def _record(runs: "Sequence[SeedRun]", seconds: float) -> None:
    """Save what was learned, test all tasks, write a line, for every run."""
    if not runs:
        return
    # Disks are slow, so what was learned is saved while it is tested. Tests are not worth threads:
    # Python runs one at a time, and handing over takes longer than waiting for a GPU.
    with ThreadPoolExecutor(len(runs)) as pool:
        saved = [pool.submit(r.save) for r in runs]
        tested = [r.test() for r in runs]
        for each in saved:
            each.result()
        list(pool.map(lambda r, row: r.note(row, seconds), runs, tested))


class SeedRun:
    """One seed's run folder, and what it holds in memory."""

    def __init__(self, config: RunConfig, stream: Stream, out: Path, resume: bool = False) -> None:
        device = torch.device(config.device)
        self.config, self.out, self.stream = config, out, stream.to(device)
        recipe = Recipe(**{k: v for k, v in config.recipe.items() if k != "name"})
        module = make_module(config, self.stream[0]).to(device)
        options = method_options(config.method, config.options)
        setting = Setting(
            module, growth_of(config), recipe, config.seed, self.stream.tasks, options
        )
        kind = method_class(config.method)
        kind.check(setting)
        _open_folder(config, out, resume)
        folder = out / NET
        self.method = kind.load(folder, setting) if kind.is_in(folder) else kind(setting)
        self.tests = [Feed(task, recipe, device) for task in self.stream]
        self.lines = read_lines(out)
        self.matrix = AccuracyMatrix([line["accuracy"] for line in self.lines])
        self._saved, self._cost = time.perf_counter(), 0.0

    @property
    def finished(self) -> bool:
        return len(self.lines) == len(self.stream)

    @property
    def next_task(self) -> Task:
        return self.stream[len(self.lines)]

    def checkpoint(self) -> Checkpoint | None:
        return _load_checkpoint(self.out, len(self.lines))

    def watch(self, on_progress: OnProgress | None, seeds: int) -> OnEpoch:
        """Keeps a checkpoint and tells how far it is, both only so often that it costs little."""
        index, told, telling = len(self.lines), 0.0, 0.0

        def on_epoch(epoch: Epoch, checkpoint: Checkpoint) -> None:
            nonlocal told, telling
            now = time.perf_counter()
            if now - self._saved >= _SHARE * self._cost:
                _save_checkpoint(self.out, index, checkpoint)
                self._saved = time.perf_counter()
                self._cost = self._saved - now
            if on_progress is not None and now - told > max(_TELL, _SHARE * telling):
                now = time.perf_counter()
                numbers = epoch.number, epoch.epochs, epoch.loss, epoch.accuracy()
                on_progress(Progress(self.config.seed, seeds, index, *numbers))
                told = time.perf_counter()
                telling = told - now

        return on_epoch

    def save(self) -> None:
        self.method.save(self.out / NET)

    def test(self) -> list[float]:
        """The accuracy on every task that was learned."""
        return [
            accuracy(lambda x, task=task: self.method.predict(x, task), self.tests[task].test())  # type: ignore[misc]
            for task in range(len(self.lines) + 1)
        ]

    def note(self, accuracies: list[float], seconds: float) -> None:
        """Write the line of a task that was learned and saved."""
        self.matrix.add(accuracies)
        index = len(self.lines)
        self.lines.append(_line(self.stream[index], self.matrix, self.method, seconds))
        _write_lines(self.out, self.lines)
        (self.out / CHECKPOINT).unlink(missing_ok=True)


def make_module(config: RunConfig, task: Task) -> nn.Module:
    """The network that the tasks' inputs fit into."""
    shape = task.train_x.shape[1:]
    if config.net == "mlp":
        return models.mlp(shape.numel(), hidden=[config.width, config.width])
    if len(shape) != 3:
        raise RunError(f"resnet18 takes images, got inputs of shape {list(shape)}")
    return models.resnet18(config.width, image_size=shape[-1], channels=shape[0])


def growth_of(config: RunConfig) -> Growth:
    return Growth(parse_rank(config.rank, config.seeded), "new", None, (), None, None, config.seed)


def parse_rank(rank: str, seeded: str | None) -> Rank:
    """A rank rule as the command line writes it.

    >>> parse_rank("11,1", None)
    Rank(first=11, step=1, seeded=0, of_outputs=False)
    >>> parse_rank("0.1,0.02", "4x")
    Rank(first=0.1, step=0.02, seeded='4x', of_outputs=True)
    """
    try:
        first, step = rank.split(",")
        amounts = (float(first), float(step)) if "." in rank else (int(first), int(step))
        entries = [e if e.endswith("x") else int(e) for e in seeded.split(",")] if seeded else [0]
    except ValueError:
        raise RankupError(
            f"rank is written as 11,1 or 0.1,0.02 and seeded as 256, 4x or 1536,768; got "
            f"rank {rank!r} and seeded {seeded!r}"
        ) from None
    spec = entries[0] if len(entries) == 1 else entries
    return Rank(amounts[0], amounts[1], spec, of_outputs="." in rank)


def read_lines(out: Path) -> list[dict[str, Any]]:
    path = out / METRICS
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def versions() -> dict[str, str]:
    return {"rankup": rankup.__version__, "torch": torch.__version__}


def check_folder(config: RunConfig, out: Path, resume: bool) -> None:
    """Refuse a folder in which that run can neither begin nor go on."""
    path = out / CONFIG
    if path.exists() and not resume:
        raise RunError(f"{out} holds a run already: add --resume to go on with it, or --out")
    if not path.exists() and out.exists() and any(out.iterdir()):
        raise RunError(f"{out} holds other files: name a new folder with --out")
    if path.exists():
        stored = read_config(path)
        wanted = json.loads(json.dumps(asdict(config)))
        differing = [k for k in wanted if k != "versions" and stored.get(k) != wanted[k]]
        if differing:
            name = differing[0]
            raise RunError(
                f"{out} was begun with {name} {stored.get(name)}, not {wanted[name]}: go on with "
                "the same options, or begin a new run with --out"
            )


def _open_folder(config: RunConfig, out: Path, resume: bool) -> None:
    check_folder(config, out, resume)
    path = out / CONFIG
    if path.exists():
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(asdict(config), indent=1, ensure_ascii=False).encode() + b"\n")
    except OSError as error:
        raise RunError(f"cannot write to {out}: {error.strerror}") from error


def _line(task: Task, matrix: AccuracyMatrix, method: Method, seconds: float) -> dict[str, Any]:
    footprint = method.footprint()
    return {
        "task": task.name,
        "accuracy": matrix.rows[-1],
        "average_accuracy": matrix.average_accuracy(),
        "forgetting": matrix.forgetting(),
        "parameters": footprint.parameters,
        "buffer": footprint.buffer,
        "seconds": seconds,
    }


def _write_lines(out: Path, lines: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_file(out / METRICS, text.encode())


def _save_checkpoint(out: Path, index: int, checkpoint: Checkpoint) -> None:
    # Renamed into place, so that a killed process leaves the old one; not forced to the disk,
    # because it is only worth an epoch.
    about = {"at": json.dumps({"task": index, "epoch": checkpoint.epoch})}
    state = {name: t.detach().to("cpu", copy=True) for name, t in checkpoint.state.items()}
    temporary = out / f".{CHECKPOINT}.tmp"
    temporary.write_bytes(safetensors.torch.save(state, about))
    os.replace(temporary, out / CHECKPOINT)


def _load_checkpoint(out: Path, index: int) -> Checkpoint | None:
    path = out / CHECKPOINT
    if not path.exists():
        return None
    with safetensors.safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["at"])
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    # One that was left from an earlier task says nothing about this one.
    return Checkpoint(about["epoch"], state) if about["task"] == index else None

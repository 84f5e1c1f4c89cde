"""Run folders with known results, and pages read back."""

import io
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from rankup.growing.options import GrowOptions
from rankup.layers.spec import DenseSpec, FactoredSpec, HeadSpec
from rankup.metrics import AccuracyMatrix
from rankup.net.tasks import KnownTask
from rankup.rank import LayerRank, Rank
from rankup.runs.read import Run
from rankup.runs.seal import seal_again
from rankup.storage.manifest import File, Manifest, task_file

RECIPE = {"name": "default", "epochs": 10, "lr": 0.01, "batch": 128, "augment": None}


def write_run(folder: Path, rows: list[list[float]], **config: Any) -> Path:
    """A run folder whose accuracies are `rows`, with seals."""
    write_old_run(folder, rows, **config)
    seal_again(folder)
    return folder


def write_old_run(folder: Path, rows: list[list[float]], **config: Any) -> Path:
    """A run folder as version 0.1 wrote it, without seals."""
    tasks = len(rows)
    settings = {
        "stream": "p-digits",
        "method": "rank",
        "options": {},
        "net": "mlp",
        "width": 256,
        "rank": "11,1",
        "seeded": None,
        "tasks": tasks,
        "seed": 0,
        "device": "cpu",
        "threads": 2,
        "recipe": RECIPE,
        "task_names": [f"permutation {t + 1:02}" for t in range(tasks)],
        "versions": {"rankup": "0.1.0", "torch": "2.13.0"},
        **config,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings))
    with open(folder / "metrics.jsonl", "w") as file:
        for t, row in enumerate(rows):
            line = {
                "task": settings["task_names"][t],
                "accuracy": row,
                "average_accuracy": sum(row) / len(row),
                "forgetting": 0.0,
                "parameters": 12_000 + 3_000 * t,
                "buffer": 0,
                "seconds": 2.5,
            }
            file.write(json.dumps(line) + "\n")
    return folder


def write_net(
    folder: Path,
    tasks: int,
    first: int = 11,
    step: int = 1,
    seeded: int = 0,
    layers: tuple[str, ...] = ("hidden.0", "hidden.1"),
) -> None:
    """The selectors in a network folder; later tasks rely on factors of the first."""
    random = np.random.default_rng(0)
    files = []
    (folder / "tasks").mkdir(parents=True)
    for t in range(tasks):
        tensors = {}
        for layer in layers:
            added = first if t == 0 else step
            used = seeded + first + step * t
            selector = random.normal(0.3, 0.4, used)
            if added:
                selector[-added:] += 1
                tensors[f"{layer}.U"] = random.normal(size=(added, 16)).astype(np.float32)
                tensors[f"{layer}.V"] = random.normal(size=(added, 64)).astype(np.float32)
            tensors[f"{layer}.selector"] = selector.astype(np.float32)
        files.append(task_file(t, f"permutation {t + 1:02}"))
        save_file(tensors, folder / files[-1])
    rank = LayerRank(first, step, seeded)
    specs = [FactoredSpec(layer, 16, 64, False, rank, False, None) for layer in layers]
    grow_options = GrowOptions(Rank(first, step, seeded))
    known = [
        (KnownTask(f"permutation {t + 1:02}", 10), File.of(file, (folder / file).read_bytes()))
        for t, file in enumerate(files)
    ]
    parts = (*specs, HeadSpec("head", 16, True), DenseSpec((), (), False))
    model = {"model": None, "class": "helpers.Net"}
    manifest = Manifest(model, torch.float32, grow_options, parts, None, tuple(known))
    (folder / "manifest.json").write_bytes(manifest.to_bytes())


def constant(tasks: int) -> list[list[float]]:
    """Accuracies that never change once a task is learned."""
    learned = [round(0.97 - 0.004 * t + 0.003 * (t % 3), 4) for t in range(tasks)]
    return [learned[: t + 1] for t in range(tasks)]


def fading(tasks: int) -> list[list[float]]:
    """Accuracies that fall with every task learned since."""
    return [[round(0.18 + 0.79 * 0.8 ** (t - j), 4) for j in range(t + 1)] for t in range(tasks)]


class Page(HTMLParser):
    """The tags of a page, checked for balance, what it refers to and may load, and its words."""

    VOID = frozenset({"meta", "link", "img", "source", "br"})

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.html = path.read_text("utf-8")
        self.open: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.policy: set[str] = set()
        self.words = ""
        self.feed(self.html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        if ("http-equiv", "Content-Security-Policy") in attrs:
            # Only what comes after it is bound by a policy.
            assert self.tags == ["html", "head", "meta", "meta"]
            self.policy = set((dict(attrs)["content"] or "").split("; "))
        self.references += [v or "" for k, v in attrs if k in ("src", "href", "srcset")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words = f"{self.words} {' '.join(data.split())}"


def named(**config: Any) -> Run:
    given = {"stream": "p-digits", "method": "rank", "seed": 0, "recipe": RECIPE, **config}
    line = {"task": "a", "accuracy": [0.5], "parameters": 1, "buffer": 0, "seconds": 1}
    return Run(Path("."), given, [line], AccuracyMatrix([[0.5]]), {}, {})


def printed(table: Table) -> str:
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    console.print(table)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(len(line) for line in text.splitlines()) <= 80
    return text

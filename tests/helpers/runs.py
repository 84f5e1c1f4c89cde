"""Settings of small runs, and what a run left in its folder."""

import hashlib
from dataclasses import asdict, replace
from pathlib import Path

import torch

from rankup.data.streams import Stream
from rankup.runs.folder import RunConfig
from rankup.runs.records import read_lines
from rankup.runs.seed_run import versions
from rankup.training.recipe import Recipe


def config_for(stream: Stream, method: str = "rank", **recipe: object) -> RunConfig:
    chosen = replace(Recipe(epochs=2, batch=128), **recipe)
    return RunConfig(
        stream=stream.name,
        method=method,
        options={},
        net="mlp",
        width=16,
        rank="3,1",
        seeded=None,
        tasks=len(stream),
        seed=0,
        device="cpu",
        threads=torch.get_num_threads(),
        recipe={"name": "default", **asdict(chosen)},
        task_names=[task.name for task in stream],
        versions=versions(),
    )


def outcome(out: Path) -> tuple[dict[str, str], list[dict]]:
    """Hashes of all under net/, and the metrics without their times."""
    files = [path for path in sorted((out / "net").rglob("*")) if path.is_file()]
    found = {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.name != ".lock"
    }
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in read_lines(out)]
    return found, lines

"""A thousand tasks on one base: what loading one of them reads and takes.

python benchmarks/many_tasks.py [mlp|vit]

Tasks are not learned but drawn: only their number and size count here.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import rankup
from rankup.net.stages import append
from rankup.net.tasks import KnownTask

TASKS = 1000


def module(kind: str) -> nn.Module:
    if kind == "mlp":
        return rankup.models.mlp(784, hidden=[256, 256])
    return rankup.models.timm("vit_small_patch16_224", num_classes=10)


def with_drawn_tasks(kind: str) -> rankup.IncrementalNet:
    """A network whose tasks use nothing but their own factors."""
    net = rankup.grow(module(kind), rankup.Rank(1, 1), base="keep")
    net.begin_task("first", 10)
    values = [part.learned() for part in net.parts]
    net.abandon_task()
    tasks = [KnownTask(f"customer {i:04}", 10, None if i == 0 else ()) for i in range(TASKS)]
    added = [
        [{k: torch.randn_like(t) for k, t in own.items()} for _ in range(TASKS)] for own in values
    ]
    append(net, tasks, added)
    return net


def bytes_of(net: rankup.IncrementalNet) -> int:
    """What tasks take in memory, without the base."""
    kept = sum(tensor.nbytes for part in net.parts for tensor in part.base().values())
    return sum(buffer.nbytes for buffer in net.buffers()) - kept


def measure(kind: str, folder: Path) -> dict[str, object]:
    whole = with_drawn_tasks(kind)
    rankup.save(whole, folder)
    files = {p.name: p.stat().st_size for p in (folder / "tasks").iterdir()}
    all_bytes = bytes_of(whole)
    read: list[int] = []
    from rankup.storage import reading

    read_regular = reading.read_regular

    def counted(path: Path, most: int) -> bytes:
        content = read_regular(path, most)
        if path.parent.name == "tasks":
            read.append(len(content))
        return content

    reading.read_regular = counted  # type: ignore[assignment]
    made = module(kind)
    began = time.perf_counter()
    net = rankup.load(folder, made, tasks=["customer 0500"])
    seconds = time.perf_counter() - began
    one_read = sum(read)
    began = time.perf_counter()
    rankup.load(folder, made, tasks=[])
    base = time.perf_counter() - began
    ten = rankup.load(folder, made, tasks=[f"customer {i:04}" for i in range(0, 1000, 100)])
    return {
        "kind": kind,
        "seconds for one": round(seconds, 3),
        "seconds for the base alone": round(base, 3),
        "bytes of tasks read over those of the task's file": one_read / next(iter(files.values())),
        "task file, bytes": next(iter(files.values())),
        "manifest, bytes": (folder / "manifest.json").stat().st_size,
        "memory of ten over all": round(bytes_of(ten) / all_bytes, 4),
        "memory of all, MB": round(all_bytes / 1e6, 1),
        "task": net.tasks,
    }


def main() -> None:
    for kind in sys.argv[1:] or ["mlp", "vit"]:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(kind, Path(folder)), indent=1))


if __name__ == "__main__":
    main()

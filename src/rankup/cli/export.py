"""The command `rankup export`."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from rankup.cli.network import AsJson, NetworkPath, network_folder
from rankup.cli.sentences import tell
from rankup.errors import RankupError


class Format(StrEnum):
    onnx = "onnx"
    torch = "torch"


def export(
    path: NetworkPath,
    to: Annotated[Format, typer.Option(help="ONNX, or a program of torch.export.")] = Format.onnx,
    task: Annotated[
        str | None, typer.Option(help="Task, by name or number; needed if there are several.")
    ] = None,
    all_tasks: Annotated[
        bool,
        typer.Option("--all", help="All tasks in one ONNX file that takes a task for each sample."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="The file, else the name of the task, or network, with .onnx or .pt2."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be written, and write nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a task, or all, as one file that needs no rankup: ONNX or torch.export.

    It leads from prepared inputs, a batch of any size, to logits. With --all it has a second input
    `task`: a task's number for each sample, from 0 on.

    Beside it, a JSON file of the same name has the names of the classes and how inputs are
    prepared. The file is loaded and compared with the network before it is kept: logits differ by
    at most 1e-5 of the largest.

    Example: rankup export nets/shop --task shoes --to onnx

    Example: rankup export nets/shop --all
    """
    from rankup.cli.progress import waiting
    from rankup.life import exporting
    from rankup.life.asking import all_asked, asked_task

    if all_tasks and (task is not None or to is not Format.onnx):
        raise RankupError("--all is for ONNX and for all tasks: leave --task and --to out")
    folder = network_folder(path)
    asked = all_asked(folder) if all_tasks else [asked_task(folder, task)]
    name = Path(os.path.abspath(path)).name if all_tasks else asked[0].name
    suffix = exporting.SUFFIXES[to.value]
    out = out or Path(f"{name}{suffix}")
    if out.suffix != suffix:
        raise RankupError(f"--out must end with {suffix} for --to {to}, got {out}")
    if taken := exporting.taken(out, exporting.said_of(asked, all_tasks)):
        raise RankupError(f"{taken} exists already: name another file with --out")
    told: dict[str, Any] = {"tasks": [each.name for each in asked], "file": str(out)}
    if dry_run:
        tell(told, f"Would write {name!r} to {out}", as_json)
        return
    with waiting(f"exporting {name}"):
        if all_tasks:
            gap = exporting.export_all(asked, out)
        else:
            gap = exporting.export(asked[0], to.value, out)
    told |= {"bytes": out.stat().st_size, "gap": gap}
    said = f"Wrote {name!r} to {out} ({told['bytes']:,} bytes); logits differ by {gap:.1e} at most"
    tell(told, said, as_json)

"""The command `rankup export`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rankup.cli.network import NetworkPath, network_folder
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
    out: Annotated[
        Path | None, typer.Option(help="The file, else the task's name with .onnx or .pt2.")
    ] = None,
) -> None:
    """Write a task as one file that needs no rankup: from prepared inputs, a batch of any size, to
    logits.

    Beside it, a JSON file of the same name has the names of the classes and how inputs are
    prepared. The file is loaded and compared with the network before it is kept: logits differ by
    at most 1e-5 of the largest.

    Example: rankup export nets/shop --task shoes --to onnx
    """
    from rankup.life.asking import asked_task
    from rankup.life.exporting import SUFFIXES
    from rankup.life.exporting import export as write

    asked = asked_task(network_folder(path), task)
    out = out or Path(f"{asked.name}{SUFFIXES[to.value]}")
    if out.suffix != SUFFIXES[to.value]:
        raise RankupError(f"--out must end with {SUFFIXES[to.value]} for --to {to}, got {out}")
    if out.exists():
        raise RankupError(f"{out} exists already: name another file with --out")
    gap = write(asked, to.value, out)
    size = out.stat().st_size
    print(f"Wrote {asked.name!r} to {out} ({size:,} bytes); logits differ by {gap:.1e} at most")

"""The command `rankup predict`."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from rankup.cli.network import network_folder
from rankup.errors import RankupError


def predict(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    files: Annotated[list[Path], typer.Argument(metavar="IMAGES", help="Files of images.")],
    task: Annotated[
        str | None,
        typer.Option(help="Task, by name or number; needed if there are several."),
    ] = None,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain", help="Lines of file, class and probability between tabs, for scripts."
        ),
    ] = False,
) -> None:
    """Say which class of a task images belong to, by the network of a run that split its classes.

    Images are converted to the size and kind of pixels that the run learned from.
    """
    from rich.console import Console
    from rich.text import Text

    from rankup.report.tables import right_aligned
    from rankup.runs.predict import predict_classes
    from rankup.runs.records import unsealed_note

    if network_folder(path) == path:
        raise RankupError(
            f"{path} is not a run folder, and only that says what images its network was taught"
        )
    if old := unsealed_note([path]):
        print(f"rankup: {old}", file=sys.stderr)
    seen = predict_classes(path, task, files)
    if plain:
        for file, (first, *_) in zip(files, seen, strict=True):
            _write_line(str(file), first.name, f"{first.probability:.4f}")
        return
    table = right_aligned("image", "%")
    table.add_column("class")
    table.add_column("or else")
    for file, (first, second, *_) in zip(files, seen, strict=True):
        others = f"{second.name} ({100 * second.probability:.1f})"
        share = f"{100 * first.probability:.1f}"
        table.add_row(Text(str(file)), share, Text(first.name), Text(others))
    Console().print(table)


def _write_line(*cells: str) -> None:
    """Cells between tabs, with the bytes of names that are no text. Backslashes stand before what
    would end a cell."""
    line = "\t".join(
        cell.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n") for cell in cells
    )
    sys.stdout.buffer.write(os.fsencode(f"{line}\n"))

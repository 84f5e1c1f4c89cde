"""The command `rankup predict`."""

import csv
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankup.cli.network import network_folder
from rankup.errors import RankupError

if TYPE_CHECKING:
    from rankup.runs.predict import Prediction


def predict(
    path: Annotated[
        Path, typer.Argument(metavar="NETWORK", help="A network's folder, or a run's.")
    ],
    items: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGES",
            help="Files of images or folders of them; for a network of texts, texts. A - stands "
            "for the lines of the standard input.",
        ),
    ],
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
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON with the probabilities of all classes.")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV with a row for each image.")] = False,
) -> None:
    """Say which class of a task images or texts belong to.

    Images are converted to the size and kind of pixels that the network learned from. A run must
    be one that split its stream's classes.

    Example: rankup predict nets/shop a.jpg b.jpg --task shoes

    Example: ls inbox/*.jpg | rankup predict nets/shop - --task shoes --csv
    """
    if plain + as_json + as_csv > 1:
        raise RankupError("--plain, --json and --csv exclude each other: name one of them")
    lines = sys.stdin.read().splitlines() if "-" in items else []
    items = [each for item in items for each in (lines if item == "-" else [item])]
    if not items:
        raise RankupError("the standard input has no lines, expected a file or a text in each")
    name, items, seen = _predictions(path, task, items)
    if as_json:
        rows = zip(items, seen, strict=True)
        print(
            json.dumps(
                [
                    {"input": item, "task": name, "classes": {c.name: c.probability for c in found}}
                    for item, found in rows
                ]
            )
        )
    elif as_csv:
        table = csv.writer(sys.stdout)
        table.writerow(("input", "task", "class", "probability"))
        for item, (first, *_) in zip(items, seen, strict=True):
            table.writerow((item, name, first.name, f"{first.probability:.4f}"))
    elif plain:
        for item, (first, *_) in zip(items, seen, strict=True):
            _write_line(item, first.name, f"{first.probability:.4f}")
    else:
        _print_table(items, seen)


def _predictions(
    path: Path, task: str | None, items: list[str]
) -> "tuple[str, list[str], list[list[Prediction]]]":
    """The task that was asked, the inputs, and the classes for each of them."""
    from rankup.life import asking
    from rankup.runs.predict import predict_classes
    from rankup.runs.records import unsealed_note

    if network_folder(path) == path:
        asked = asking.asked_task(path, task)
        items = asking.expanded(items, asked.inputs)
        return asked.name, items, asking.predict(asked, items)
    if old := unsealed_note([path]):
        print(f"rankup: {old}", file=sys.stderr)
    return task or "", items, predict_classes(path, task, list(map(Path, items)))


def _print_table(items: Sequence[str], seen: "Sequence[Sequence[Prediction]]") -> None:
    from rich.console import Console
    from rich.text import Text

    from rankup.report.tables import right_aligned

    table = right_aligned("image", "%")
    table.add_column("class")
    table.add_column("or else")
    for item, (first, second, *_) in zip(items, seen, strict=True):
        others = f"{second.name} ({100 * second.probability:.1f})"
        share = f"{100 * first.probability:.1f}"
        table.add_row(Text(item), share, Text(first.name), Text(others))
    Console().print(table)


def _write_line(*cells: str) -> None:
    """Cells between tabs, with the bytes of names that are no text. Backslashes stand before what
    would end a cell."""
    line = "\t".join(
        cell.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n") for cell in cells
    )
    sys.stdout.buffer.write(os.fsencode(f"{line}\n"))

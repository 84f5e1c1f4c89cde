"""The command `rankup predict`."""

import csv
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankup.cli.network import NetworkPlace, network_place
from rankup.errors import RankupError

if TYPE_CHECKING:
    from rankup.life.asking import Guessed
    from rankup.runs.predict import Prediction

_UNLIKE = 0.99  # of a task's own inputs fit better: an input is marked as unlike any


def predict(
    path: NetworkPlace,
    items: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUTS",
            help="Files of images or folders of them; for a network of texts, texts; CSV files "
            "with a column of either. A - stands for the lines of the standard input.",
        ),
    ],
    task: Annotated[
        str | None,
        typer.Option(help="Task, by name or number; without, a network with a router guesses it."),
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

    Without --task, a network with a router says of which task they are, too. Images are converted
    to the size and kind of pixels that the network learned from. Those that cannot be read are
    named and left out; it then exits with 1. A run must be one that split its stream's classes.

    Example: rankup predict nets/shop a.jpg b.jpg --task shoes

    Example: ls inbox/*.jpg | rankup predict nets/shop - --task shoes --csv
    """
    if plain + as_json + as_csv > 1:
        raise RankupError("--plain, --json and --csv exclude each other: name one of them")
    lines = [each for each in sys.stdin.read().splitlines() if each.strip()] if "-" in items else []
    items = [each for item in items for each in (lines if item == "-" else [item])]
    if not items:
        raise RankupError("the standard input has no lines, expected a file or a text in each")
    broken: list[str] = []
    found = _predictions(path, task, items, broken)
    if as_json:
        print(json.dumps([answer.to_json() for answer in found]))
    elif as_csv:
        table = csv.writer(sys.stdout)
        table.writerow(("input", "task", "class", "probability"))
        for answer in found:
            first = answer.classes[0]
            table.writerow((answer.item, answer.task, first.name, f"{first.probability:.4f}"))
    elif plain:
        for answer in found:
            first = answer.classes[0]
            _write_line(answer.item, first.name, f"{first.probability:.4f}")
    else:
        _print_table(found)
    if broken:
        sys.stdout.flush()
        for each in broken:
            print(f"rankup: left out: {each}", file=sys.stderr)
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Answer:
    """What a network says of an input, about its task only if that was guessed."""

    item: str
    task: str
    classes: "Sequence[Prediction]"
    guess: "Guessed | None" = None

    def to_json(self) -> dict[str, Any]:
        classes = {each.name: each.probability for each in self.classes}
        said = {"input": self.item, "task": self.task, "classes": classes}
        if self.guess is None:
            return said
        return said | {"task_probability": self.guess.probability, "none": self.guess.none}


def _predictions(
    given: str, task: str | None, items: list[str], broken: list[str]
) -> list[_Answer]:
    """What the network says of each input that can be read."""
    from rankup.life import asking
    from rankup.runs.predict import predict_classes
    from rankup.runs.records import unsealed_note

    place, run = network_place(given), Path(given)
    if isinstance(place, Path) and place != run:
        if old := unsealed_note([run]):
            print(f"rankup: {old}", file=sys.stderr)
        seen = zip(items, predict_classes(run, task, list(map(Path, items))), strict=True)
        return [_Answer(item, task or "", classes) for item, classes in seen]
    if task is None and (untold := asking.untold(place)) is not None:
        guessed = asking.guess(untold, asking.expanded(items, untold.inputs), broken)
        return [_Answer(item, each.task, each.classes, each) for item, each in guessed]
    asked = asking.asked_task(place, task)
    answers = asking.predict(asked, asking.expanded(items, asked.inputs), broken)
    return [_Answer(item, asked.name, classes) for item, classes in answers]


def _print_table(found: Sequence[_Answer]) -> None:
    from rich.console import Console
    from rich.text import Text

    from rankup.report.tables import print_table, right_aligned

    table = right_aligned("input", "%")
    table.add_column("class")
    table.add_column("or else", overflow="fold")
    guessed = [answer.guess for answer in found if answer.guess]
    if guessed:
        table.add_column("task", overflow="fold")
    for answer in found:
        first, second, *_ = answer.classes
        others = f"{second.name} ({100 * second.probability:.1f})"
        share = f"{100 * first.probability:.1f}"
        task = [_task_of(answer.guess)] if answer.guess else []
        table.add_row(*map(Text, (answer.item, share, first.name, others, *task)))
    print_table(Console(), table)


def _task_of(guess: "Guessed") -> str:
    """A guessed task, how sure it is, and a mark where the input looks like none that is known."""
    unlike = ", unlike any" if guess.none > _UNLIKE else ""
    return f"{guess.task} ({100 * guess.probability:.1f}{unlike})"


def _write_line(*cells: str) -> None:
    """Cells between tabs, with the bytes of names that are no text. Backslashes stand before what
    would end a cell."""
    line = "\t".join(
        cell.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n") for cell in cells
    )
    sys.stdout.buffer.write(os.fsencode(f"{line}\n"))

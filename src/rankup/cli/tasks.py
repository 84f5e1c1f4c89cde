"""The command `rankup tasks`."""

import json
from typing import Annotated, Any

import typer

from rankup.cli.network import NetworkPath, network_folder


def tasks(
    path: NetworkPath,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all details.")] = False,
) -> None:
    """List what a network has learned: classes, accuracy on held-out data, samples, the tasks from
    whose factors each selects, and how many numbers it added.

    Example: rankup tasks nets/shop
    """
    from rich.console import Console

    from rankup.life.listing import described
    from rankup.report.tables import add_row, print_table, right_aligned

    known = described(network_folder(path))
    if as_json:
        print(json.dumps([task.to_json() for task in known]))
        return
    if not known:
        print(f"{path} knows no task yet: teach it one with `rankup learn {path} FOLDER`")
        return
    table = right_aligned("task", "classes", "% right", "samples", "numbers")
    table.add_column("uses", overflow="fold")
    table.add_column("title", overflow="fold")
    for task in known:
        share = "–" if task.accuracy is None else f"{100 * task.accuracy:.1f}"
        uses = ", ".join(task.uses) if len(task.uses) < 4 else f"{len(task.uses)} tasks"
        counts = str(task.classes), share, _count(task.samples), _count(task.numbers)
        add_row(table, task.name, *counts, uses or "–", task.title)
    print_table(Console(), table)


def _count(number: Any) -> str:
    return "–" if number is None else f"{number:,}"

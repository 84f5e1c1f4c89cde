"""The command `rankup tasks`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankup.cli.network import NetworkPlace, network_place
from rankup.cli.sentences import say

if TYPE_CHECKING:
    from rankup.net.about import TaskDescription


def tasks(
    path: NetworkPlace,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all details.")] = False,
) -> None:
    """List what a network has learned.

    For each task: classes, accuracy on held-out data, samples, how many numbers it added, the tasks
    from whose factors it selects and, where tasks drop factors, the share of them that it kept.

    Example: rankup tasks nets/shop
    """
    from rich.console import Console

    from rankup.life.listing import described
    from rankup.report.tables import add_row, print_table, right_aligned

    known = described(Path(network_place(path)))
    if as_json:
        print(json.dumps([task.to_json() for task in known]))
        return
    if not known:
        say(f"{path} knows no task yet: teach it one with `rankup learn {path} FOLDER`")
        return
    prunes = any(task.kept for task in known)
    more = ["% kept"] if prunes else []
    table = right_aligned("task", "classes", "% right", "samples", "numbers", *more)
    table.add_column("uses", overflow="fold")
    table.add_column("title", overflow="fold")
    for task in known:
        share = "–" if task.accuracy is None else f"{100 * task.accuracy:.1f}"
        uses = ", ".join(task.uses) if len(task.uses) < 4 else f"{len(task.uses)} tasks"
        counts = [str(task.classes), share, _count(task.samples), _count(task.numbers)]
        counts += [_share_kept(task)] if prunes else []
        add_row(table, task.name, *counts, uses or "–", task.title)
    print_table(Console(), table)


def _share_kept(task: "TaskDescription") -> str:
    """The share of the factors it could select from that a task kept, of all layers together."""
    kept, of = (sum(getattr(k, name) for k in task.kept.values()) for name in ("factors", "of"))
    return f"{100 * kept / of:.0f}" if of else "–"


def _count(number: Any) -> str:
    return "–" if number is None else f"{number:,}"

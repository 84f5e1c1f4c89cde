"""The command `rankup test`."""

# ruff: noqa: PT028 (its function is no test of pytest's)

import json
from pathlib import Path
from typing import Annotated

import typer

from rankup.cli.network import AsJson, NetworkPlace, network_place
from rankup.cli.sentences import say


def test(
    path: NetworkPlace,
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help="A folder per class with the task's names, or a table of images or texts.",
        ),
    ],
    task: Annotated[
        str | None, typer.Option(help="Task, by name or number; needed if there are several.")
    ] = None,
    held_out: Annotated[
        bool,
        typer.Option(
            "--held-out", help="Only with what `rankup learn` holds out of such a folder."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Count how many labelled images or texts of each class a task gets right.

    All that is in the folder counts, or its folder test if there is one. A folder that the task
    was learned from holds what it has seen: --held-out leaves that aside.

    Example: rankup test nets/shop photos/new-shoes --task shoes
    """
    from rich.console import Console

    from rankup.life import asking
    from rankup.report.tables import add_row, print_table, right_aligned

    tested = asking.test(asking.asked_task(network_place(path), task), data, held_out)
    if as_json:
        about = {"task": tested.asked.name, "accuracy": tested.accuracy}
        counts = {"right": tested.right, "samples": tested.counts, "broken": list(tested.broken)}
        print(json.dumps(about | counts))
        return
    for broken in tested.broken:
        say(f"Left out: {broken}")
    table = right_aligned("class", "right", "of", "%")
    for name, count in tested.counts.items():
        share = f"{100 * tested.right[name] / count:.1f}" if count else "–"
        add_row(table, name, f"{tested.right[name]:,}", f"{count:,}", share)
    print_table(Console(), table)
    right, total = sum(tested.right.values()), sum(tested.counts.values())
    say(f"{tested.asked.name!r}: {tested.accuracy:.1%} right, {right:,} of {total:,}")

"""The command `rankup verify`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from rankup.cli.network import AsJson
from rankup.errors import RankupError


def verify(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER...", help="A network's folder, a run's, or one that holds several."
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Check that runs and networks are whole: every seal, hash, shape and name.

    Says what is wrong, a line for each problem, and exits with 1 if anything is.

    Example: rankup verify nets/shop
    """
    from rankup.runs.records import runs_below, unlisted_note
    from rankup.runs.verify import verify_all

    for path in paths:
        if not path.exists():
            raise RankupError(f"there is no folder {path}")
    told = []
    for verdict in (verdict for path in paths for verdict in verify_all(path)):
        told.append({"path": str(verdict.path), "problems": list(verdict.problems)})
        if not as_json:
            print(verdict, file=sys.stdout if verdict else sys.stderr)
    if as_json:
        print(json.dumps(told))
    if any(each["problems"] for each in told):
        raise typer.Exit(1)
    if note := unlisted_note([run for path in paths for run in runs_below(path)]):
        print(f"rankup: {note}", file=sys.stderr)

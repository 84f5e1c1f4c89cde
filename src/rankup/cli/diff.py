"""The command `rankup diff`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rankup.cli.network import AsJson, network_folder


def diff(
    first: Annotated[Path, typer.Argument(help="A network's folder, or a run's.")],
    second: Annotated[Path, typer.Argument(help="Another one.")],
    as_json: AsJson = False,
) -> None:
    """Tell how two networks differ.

    That is what they were made of, and their tasks, which are the same only if they are so to the
    bit. Like diff, it exits with 1 if they differ.

    Example: rankup diff nets/shop colleague/shop
    """
    from rankup.life.listing import differences

    found = differences(network_folder(first), network_folder(second))
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        for what, (mine, theirs) in found.grown.items():
            print(f"{what}: {mine} in {first}, {theirs} in {second}")
        for folder, names in ((first, found.only_first), (second, found.only_second)):
            for name in names:
                print(f"only in {folder}: {name}")
        for name, keys in found.different.items():
            print(f"different: {name} ({', '.join(keys)})")
        print(f"the same in both: {', '.join(found.same) or 'no task'}")
    if found:
        raise typer.Exit(1)

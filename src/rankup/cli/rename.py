"""The command `rankup rename`."""

import json
from typing import Annotated

import typer

from rankup.cli.network import AsJson, NetworkPath, network_folder
from rankup.cli.sentences import say
from rankup.errors import RankupError


def rename(
    path: NetworkPath,
    task: Annotated[str, typer.Argument(help="The task, by the name it was learned under.")],
    title: Annotated[
        str | None, typer.Argument(help="A name for people; without, it keeps the one it has.")
    ] = None,
    description: Annotated[str | None, typer.Option(help="What it is about.")] = None,
    tags: Annotated[str | None, typer.Option(help="Words with commas.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would change, and change nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Give a task a name for people, a description or tags.

    Programs go on using the name that it was learned under: by that name its numbers were drawn
    and other tasks select from it.

    Example: rankup rename nets/shop shoes "Shoes, summer 2026"

    Example: rankup rename nets/shop shoes --tags summer,sale
    """
    from rankup.life.moving import refuse_unknown, renamed

    said = {"title": title, "description": description}
    words = None if tags is None else [word.strip() for word in tags.split(",") if word.strip()]
    given = {key: value for key, value in {**said, "tags": words}.items() if value is not None}
    if not given:
        raise RankupError("nothing to say of it: give a title, --description or --tags")
    folder = network_folder(path)
    refuse_unknown(folder, task)
    if not dry_run:
        renamed(folder, task, **given)
    if as_json:
        print(json.dumps({"network": str(path), "task": task, **given}))
    else:
        what = f"called {title!r}" if title is not None else "described anew"
        say(f"{task!r} of {path} {'would be' if dry_run else 'is now'} {what}")

"""The command `rankup pull`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from rankup.cli.network import AsJson
from rankup.cli.sentences import say, tell
from rankup.cli.transfer import DryRun, Yes


def pull(
    repository: Annotated[
        str,
        typer.Argument(
            metavar="USER/NAME", help="A repository, or with @ a branch, tag or commit."
        ),
    ],
    folder: Annotated[
        Path | None, typer.Argument(help="Where to; else a folder of the repository's name here.")
    ] = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Fetch a network from the Hugging Face Hub that `rankup push` has put there, or what is new.

    Only files that are missing are fetched, each is compared with its hash, and the manifest is
    replaced last, so that the folder holds a whole network at any moment. Nothing that is fetched
    is unpickled or executed. Tasks that only you have would be removed, after a question: to keep
    both, pull to another folder and `rankup join`.

    Example: rankup pull user/shop nets/shop
    """
    from rankup.cli.transfer import confirm_removal, hub_bars, sizes, would
    from rankup.storage.hub import plan_pull
    from rankup.utils.hub import Address

    address = Address.parse(repository)
    folder = folder or Path(address.repository.rpartition("/")[2])
    with hub_bars():
        plan = plan_pull(address, folder)
    fetched = {file.file: file.size for file in plan.fetched}
    told: dict[str, Any] = {
        "repository": str(address),
        "commit": plan.repository.commit,
        "network": str(folder),
        "fetched": fetched,
        "tasks": [task.name for task, _ in plan.new.tasks],
        "tasks_removed": plan.removed,
    }
    if dry_run:
        text = would(f"fetch {sizes(fetched)} to {folder}", plan.removed)
        tell(told, text, as_json)
        return
    confirm_removal(str(folder), plan.removed, str(address), yes)
    with hub_bars():
        plan.carry_out()
    count = len(plan.new.tasks)
    if as_json:
        print(json.dumps(told))
    else:
        say(
            f"Pulled {address} to {folder}: {sizes(fetched)}; it knows {count} "
            f"task{'s' if count != 1 else ''}"
        )

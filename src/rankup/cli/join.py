"""The command `rankup join`."""

from pathlib import Path
from typing import Annotated

import typer

from rankup.cli.network import AsJson, NetworkPath, network_folder, refuse_address
from rankup.cli.sentences import tell


def join(
    path: Annotated[
        Path, typer.Argument(metavar="NETWORK", help="The network to extend, or one to be made.")
    ],
    other: NetworkPath,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would come, and change nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Take over all tasks of another network, or of a run.

    It must have been made alike: by the same options of `rankup new` and the same seed. All tasks
    answer as before, to the bit. Those that both know must be equal.

    Example: rankup join nets/shop colleague/shop
    """
    from rankup.life.moving import joined

    refuse_address(path)
    folder = network_folder(path) if path.exists() else path
    edit = joined(folder, network_folder(other))
    names = [task.name for task, _ in edit.new.tasks]
    new = names[len(edit.old.tasks) if edit.old else 0 :]
    listed = ", ".join(map(repr, new)) or "no task that it does not know"
    told = {"network": str(path), "joined": new, "tasks": names}
    if dry_run:
        text = f"{path} would get {listed}; nothing was changed"
        tell(told, text, as_json)
        return
    edit.carry_out()
    count = f"{len(names)} task{'s' if len(names) != 1 else ''}"
    text = f"{path} got {listed} from {other}, and now knows {count}"
    tell(told, text, as_json)

"""The command `rankup remove`."""

from typing import Annotated

import typer

from rankup.cli.network import AsJson, NetworkPath, network_folder
from rankup.cli.sentences import tell


def remove(
    path: NetworkPath,
    tasks: Annotated[list[str], typer.Argument(help="The tasks, by name.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and change nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove tasks from a network; nothing of them is left in its folder.

    All others answer as before, to the bit. A task from whose factors others select cannot be
    removed alone: name these, too.

    Example: rankup remove nets/shop shoes --yes
    """
    from rankup.storage.editing import removal

    names = list(dict.fromkeys(tasks))
    edit = removal(network_folder(path), names)
    listed, count = ", ".join(map(repr, names)), len(edit.new.tasks)
    left = f"{count} {'task' if count == 1 else 'tasks'}"
    told = {"network": str(path), "removed": names, "tasks": [t.name for t, _ in edit.new.tasks]}
    if dry_run:
        text = f"{listed} would go from {path}, which would keep {left}; nothing was changed"
        tell(told, text, as_json)
        return
    if not yes:
        typer.confirm(f"Remove {listed} from {path} for good?", abort=True, err=True)
    edit.carry_out()
    text = f"Removed {listed} from {path}, which keeps {left}"
    tell(told, text, as_json)

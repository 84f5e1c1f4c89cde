"""The command `rankup remove`."""

from typing import Annotated

import typer

from rankup.cli.network import NetworkPath, network_folder


def remove(
    path: NetworkPath,
    tasks: Annotated[list[str], typer.Argument(help="The tasks, by name.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and change nothing.")
    ] = False,
) -> None:
    """Remove tasks from a network: nothing of them is left in its folder, and all others answer as
    before, to the bit.

    A task from whose factors others select cannot be removed alone: name these, too.

    Example: rankup remove nets/shop shoes --yes
    """
    from rankup.life.moving import removed
    from rankup.storage.store import save

    folder = network_folder(path)
    names = list(dict.fromkeys(tasks))
    net = removed(folder, names)
    listed = ", ".join(map(repr, names))
    left = f"{len(net.tasks)} {'task' if len(net.tasks) == 1 else 'tasks'}"
    if dry_run:
        print(f"{listed} would go from {path}, which would keep {left}; nothing was changed")
        return
    if not yes:
        typer.confirm(f"Remove {listed} from {path} for good?", abort=True)
    save(net, folder)
    print(f"Removed {listed} from {path}, which keeps {left}")

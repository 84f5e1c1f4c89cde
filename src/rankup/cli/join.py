"""The command `rankup join`."""

from pathlib import Path
from typing import Annotated

import typer

from rankup.cli.network import NetworkPath, network_folder


def join(
    path: Annotated[
        Path, typer.Argument(metavar="NETWORK", help="The network to extend, or one to be made.")
    ],
    other: NetworkPath,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would come, and change nothing.")
    ] = False,
) -> None:
    """Take over all tasks of another network, or of a run, that was made alike: by the same
    options of `rankup new` and the same seed.

    All tasks answer as before, to the bit. Those that both know must be equal.

    Example: rankup join nets/shop colleague/shop
    """
    from rankup.life.moving import joined
    from rankup.storage.store import save

    folder = network_folder(path) if path.exists() else path
    net, new = joined(folder, network_folder(other))
    listed = ", ".join(map(repr, new)) or "no task that it does not know"
    if dry_run:
        print(f"{path} would get {listed}; nothing was changed")
        return
    save(net, folder)
    print(f"{path} got {listed} from {other}, and now knows {len(net.tasks)} tasks")

"""The command `rankup verify`."""

import sys

import typer

from rankup.cli.network import NetworkPath, network_folder


def verify(path: NetworkPath) -> None:
    """Check that a network is whole: every hash, shape and name. Exits with 1 if it is not."""
    from rankup.storage.store import verify as check

    verdict = check(network_folder(path))
    print(verdict, file=sys.stdout if verdict else sys.stderr)
    if not verdict:
        raise typer.Exit(1)

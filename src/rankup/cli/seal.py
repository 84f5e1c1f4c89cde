"""The command `rankup seal`."""

from pathlib import Path
from typing import Annotated

import typer


def seal(
    path: Annotated[
        Path, typer.Argument(help="A run's folder, a comparison's, or METHOD.json of `tune`.")
    ],
) -> None:
    """Seal a run again after you have changed its files on purpose.

    What runs write is sealed by hashes, and a file that does not match its seal is refused. This
    seals config.json and metrics.jsonl of a run as they are now, compare.json of a comparison, or
    what `rankup tune` has chosen. A run that was begun by version 0.1, which wrote no seals, gets
    them.
    """
    from rankup.runs.seal import seal_again

    print(seal_again(path))

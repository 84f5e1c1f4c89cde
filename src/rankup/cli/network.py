"""The argument that names a network, for `rankup info`, `verify` and `predict`."""

from pathlib import Path
from typing import Annotated

import typer

from rankup.errors import RankupError

NetworkPath = Annotated[Path, typer.Argument(help="A network's folder, or a run's.")]


def network_folder(path: Path) -> Path:
    """The folder of a network, which may be named by its run."""
    from rankup.runs.records import CONFIG, NET, read_config, runs_in

    if not path.exists():
        raise RankupError(f"there is no folder {path}")
    if not (path / CONFIG).exists():
        if runs := runs_in(path):
            raise RankupError(f"{path} holds {len(runs)} runs: name one of them, such as {runs[0]}")
        return path
    if (method := read_config(path / CONFIG)["method"]) != "rank":
        raise RankupError(
            f"{path} is a run of {method}, but only a run of rank has a network of factors"
        )
    return path / NET

"""The argument that names a network, and the option that most of its commands have."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankup.errors import RankupError

if TYPE_CHECKING:
    from rankup.storage.store import StrPath

NetworkPath = Annotated[
    Path, typer.Argument(metavar="NETWORK", help="A network's folder, or a run's.")
]
# As text: a path would make one slash of two.
NetworkPlace = Annotated[
    str,
    typer.Argument(
        metavar="NETWORK",
        help="A network's folder, or a run's; or hf://USER/NAME, on the Hugging Face Hub, and "
        "with @ a branch, tag or commit.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def network_place(path: str) -> "StrPath":
    """The folder of a network, or its copy in the cache of the Hub's client, where its manifest and
    notes are then."""
    from rankup.storage.store import located
    from rankup.utils.hub import SCHEME

    return located(path) if path.startswith(SCHEME) else network_folder(Path(path))


def refuse_address(path: Path) -> None:
    """Refuse hf://USER/NAME, of which a path has left one slash, where a folder is needed."""
    if path.parts[:1] == ("hf:",):
        repository = "/".join(path.parts[1:])
        raise RankupError(
            f"hf://{repository} is on the Hugging Face Hub, expected a folder: fetch it with "
            f"`rankup pull {repository}`"
        )


def network_folder(path: Path) -> Path:
    """The folder of a network, which may be named by its run."""
    from rankup.runs.records import CONFIG, NET, read_config, runs_in

    refuse_address(path)
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

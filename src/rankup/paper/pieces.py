"""How long one waited for results: a file for each time that runs were made, beside the results.

Runs that share a GPU each count the time of all, so that their sum says nothing of it.

pieces/BEGUN-DIGEST.json
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path

import torch

from rankup.errors import RankupError
from rankup.files import write_file
from rankup.paper.cells import Cell

FOLDER = "pieces"


@dataclass
class Piece:
    begun: str  # in UTC
    machine: str
    torch: str
    command: str
    seconds: float = 0.0
    cells: list[str] = field(default_factory=list)  # the files of those that came to their end


@contextmanager
def piece(root: Path, machine: str, command: str) -> Iterator[Callable[[Cell], None]]:
    """Inside, runs are made, and it is told of each cell that came to its end. However it ends, its
    time is written down."""
    began, now = time.perf_counter(), datetime.now(UTC)
    own = Piece(now.isoformat(timespec="microseconds"), machine, torch.__version__, command)
    # Two processes may begin in the same second, on one machine or on two.
    who = f"{platform.node()} {os.getpid()} {now.timestamp()}"
    digest = hashlib.sha256(who.encode()).hexdigest()[:6]
    path = root / FOLDER / f"{now:%Y-%m-%dT%H-%M-%S}-{digest}.json"

    def write() -> None:
        own.seconds = round(time.perf_counter() - began, 1)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, json.dumps(asdict(own), ensure_ascii=False).encode() + b"\n")
        except OSError as error:
            raise RankupError(f"{path} cannot be written: {error.strerror}") from error

    def ended(cell: Cell) -> None:
        own.cells.append(str(cell.folder()))
        write()  # now, so that little is lost if this process is killed

    write()  # before anything is run, so that nothing is run in vain
    try:
        yield ended
    finally:
        write()


def pieces_in(root: Path) -> list[Piece]:
    """In the order in which they were begun."""
    found = []
    for path in (root / FOLDER).glob("*.json"):
        try:
            own = Piece(**json.loads(path.read_bytes()))
            found.append((datetime.fromisoformat(own.begun), own))
        except (OSError, ValueError, TypeError):
            raise RankupError(
                f"{path} does not say how long a piece took: remove it, and it will not be counted"
            ) from None
    return [own for _, own in sorted(found, key=itemgetter(0))]


def waits(root: Path, cells: Collection[Cell]) -> list[str]:
    """For each machine on which all of these cells were run how long that took. What a piece lost
    by being stopped is counted, and so is what it ran beside these cells."""
    shown = {str(own.folder()) for own in cells}
    by_machine: dict[str, list[Piece]] = {}
    for own in pieces_in(root):
        by_machine.setdefault(own.machine, []).append(own)
    lines = []
    for machine, pieces in by_machine.items():
        if shown <= {name for own in pieces for name in own.cells}:
            minutes = sum(own.seconds for own in pieces) / 60
            which = "one piece" if len(pieces) == 1 else f"{len(pieces)} pieces"
            lines.append(
                f"All {len(shown)} settings took {minutes:.0f} min on one {machine}, in {which}."
            )
    return lines

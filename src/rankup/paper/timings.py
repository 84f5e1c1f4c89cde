"""How long one waited for results: a file for each session of runs, beside the results.

Runs that share a GPU each count the time of all, so their sum is meaningless.

pieces/BEGUN-DIGEST.json
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path

import torch

from rankup.errors import RankupError
from rankup.paper.experiment import Cell
from rankup.storage.atomic import write_file

FOLDER = "pieces"
_OFTEN = 10.0  # seconds after which the time is written again


@dataclass
class Piece:
    begun: str  # in UTC
    machine: str
    torch: str
    command: str
    seconds: float = 0.0
    cells: list[str] = field(default_factory=list)  # the files of finished cells

    @property
    def when(self) -> datetime:
        begun = datetime.fromisoformat(self.begun)
        return begun if begun.tzinfo else begun.replace(tzinfo=UTC)


class Watch:
    """Records every now and then how long a piece has taken, so that little of it is lost if the
    process is killed."""

    def __init__(self, path: Path, begun: Piece) -> None:
        self._path, self._piece = path, begun
        self._began = self._wrote = time.perf_counter()

    def ended(self, cell: Cell) -> None:
        self._piece.cells.append(str(cell.folder()))
        self.write()

    def goes_on(self) -> None:
        if time.perf_counter() - self._wrote > _OFTEN:
            self.write()

    def write(self) -> None:
        self._wrote = time.perf_counter()
        self._piece.seconds = round(self._wrote - self._began, 1)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(asdict(self._piece), ensure_ascii=False)
            write_file(self._path, text.encode() + b"\n")
        except OSError as error:
            raise RankupError(f"{self._path} cannot be written: {error.strerror}") from error


@contextmanager
def piece(root: Path, machine: str, command: str) -> Iterator[Watch]:
    """Inside, the watch is to be told of runs. However it ends, its time is written."""
    now = datetime.now(UTC)
    begun = Piece(now.isoformat(timespec="microseconds"), machine, torch.__version__, command)
    # Two processes may begin in the same second, on one machine or on two.
    who = f"{platform.node()} {os.getpid()} {now.timestamp()}"
    digest = hashlib.sha256(who.encode()).hexdigest()[:6]
    watch = Watch(root / FOLDER / f"{now:%Y-%m-%dT%H-%M-%S}-{digest}.json", begun)
    watch.write()  # before anything is run, as it would be in vain if this failed
    try:
        yield watch
    finally:
        watch.write()


def pieces_in(root: Path) -> list[Piece]:
    """All pieces, in the order in which they were begun."""
    found = []
    for path in (root / FOLDER).glob("*.json"):
        try:
            piece = Piece(**json.loads(path.read_bytes()))
            if not (isinstance(piece.machine, str) and 0 <= piece.seconds < math.inf):
                raise TypeError
            if not all(isinstance(name, str) for name in piece.cells):
                raise TypeError
            found.append((piece.when, piece))
        except OSError as error:
            raise RankupError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, TypeError):
            raise RankupError(
                f"{path} does not say how long a piece took: remove it, and it will not be counted"
            ) from None
    return [piece for _, piece in sorted(found, key=itemgetter(0))]


def waits(root: Path, cells: Collection[Cell]) -> list[str]:
    """How long it took to run these cells, a line for each machine that ran some. Time that a piece
    lost by being stopped counts, and so does what it ran besides these cells; but the time of
    pieces that ran side by side counts only once."""
    shown = {str(cell.folder()) for cell in cells}
    by_machine: dict[str, list[Piece]] = {}
    for piece in pieces_in(root):
        by_machine.setdefault(piece.machine, []).append(piece)
    lines = []
    for machine, pieces in by_machine.items():
        ran = shown & {name for piece in pieces for name in piece.cells}
        if not ran:
            continue
        who = f"All {len(ran)}" if ran == shown else f"{len(ran)} of {len(shown)}"
        which = "one piece" if len(pieces) == 1 else f"{len(pieces)} pieces"
        took = f"{_waited(pieces) / 60:.0f} min on one {machine}, in {which}"
        lines.append((-len(ran), f"{who} settings took {took}."))
    return [line for _, line in sorted(lines)]


def _waited(pieces: Collection[Piece]) -> float:
    """Seconds in which at least one of these pieces ran, given in the order in which they began.

    >>> at = [Piece(f"2026-01-01T10:{m:02}:00", "", "", "", 60.0 * n) for m, n in ((0, 9), (5, 2))]
    >>> _waited(at), _waited(at[:1]), _waited([*at, Piece("2026-01-02", "", "", "", 60.0)])
    (540.0, 540.0, 600.0)
    """
    total, until = 0.0, -math.inf
    for piece in pieces:
        begun = piece.when.timestamp()
        total += max(0.0, begun + piece.seconds - max(begun, until))
        until = max(until, begun + piece.seconds)
    return total

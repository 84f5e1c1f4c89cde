"""Timings: how long one waited for results, a file for each time that something was run.

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
from rankup.paper.experiment import Experiment
from rankup.storage.atomic import write_file
from rankup.utils.files import read_regular

FOLDER = "pieces"  # inside the results
_OFTEN = 10.0  # seconds after which the time is written again


@dataclass
class Timing:
    begun: str  # in UTC
    machine: str
    torch: str
    command: str
    seconds: float = 0.0
    cells: list[str] = field(default_factory=list)  # files of the finished experiments

    @property
    def when(self) -> datetime:
        begun = datetime.fromisoformat(self.begun)
        return begun if begun.tzinfo else begun.replace(tzinfo=UTC)


class Stopwatch:
    """Writes a timing every now and then, so that little of it is lost if the process is killed."""

    def __init__(self, path: Path, timing: Timing) -> None:
        self._path, self._timing = path, timing
        self._began = self._wrote = time.perf_counter()

    def finished(self, experiment: Experiment) -> None:
        self._timing.cells.append(str(experiment.folder()))
        self.write()

    def tick(self) -> None:
        if time.perf_counter() - self._wrote > _OFTEN:
            self.write()

    def write(self) -> None:
        self._wrote = time.perf_counter()
        self._timing.seconds = round(self._wrote - self._began, 1)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(asdict(self._timing), ensure_ascii=False)
            write_file(self._path, text.encode() + b"\n")
        except OSError as error:
            raise RankupError(f"{self._path} cannot be written: {error.strerror}") from error


@contextmanager
def timed(root: Path, machine: str, command: str) -> Iterator[Stopwatch]:
    """Time what runs inside, however it ends."""
    now = datetime.now(UTC)
    timing = Timing(now.isoformat(timespec="microseconds"), machine, torch.__version__, command)
    # Two processes may begin in the same second, on one machine or on two.
    process = f"{platform.node()} {os.getpid()} {now.timestamp()}"
    digest = hashlib.sha256(process.encode()).hexdigest()[:6]
    watch = Stopwatch(root / FOLDER / f"{now:%Y-%m-%dT%H-%M-%S}-{digest}.json", timing)
    watch.write()  # before anything is run, as it would be in vain if this failed
    try:
        yield watch
    finally:
        watch.write()


def read_timings(root: Path) -> list[Timing]:
    """All timings, in the order in which they were begun."""
    timings = []
    for path in (root / FOLDER).glob("*.json"):
        try:
            timing = Timing(**json.loads(read_regular(path)))
            if not (isinstance(timing.machine, str) and 0 <= timing.seconds < math.inf):
                raise TypeError
            if not all(isinstance(name, str) for name in timing.cells):
                raise TypeError
            timings.append((timing.when, timing))
        except OSError as error:
            raise RankupError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, TypeError, RecursionError):
            raise RankupError(
                f"{path} does not say how long a piece took: remove it, and it will not be counted"
            ) from None
    return [timing for _, timing in sorted(timings, key=itemgetter(0))]


def waits(root: Path, experiments: Collection[Experiment]) -> list[str]:
    """How long these experiments took, a line for each machine that ran some. What was run besides
    them and time lost by a stop count, too; time in which several timings overlap counts once."""
    shown = {str(experiment.folder()) for experiment in experiments}
    by_machine: dict[str, list[Timing]] = {}
    for timing in read_timings(root):
        by_machine.setdefault(timing.machine, []).append(timing)
    lines = []
    for machine, timings in by_machine.items():
        ran = shown & {name for timing in timings for name in timing.cells}
        if not ran:
            continue
        count = f"All {len(ran):,}" if ran == shown else f"{len(ran):,} of {len(shown):,}"
        pieces = "one piece" if len(timings) == 1 else f"{len(timings)} pieces"
        took = f"{_waited(timings) / 60:.0f} min on one {machine}, in {pieces}"
        lines.append((-len(ran), f"{count} settings took {took}."))
    return [line for _, line in sorted(lines)]


def _waited(timings: Collection[Timing]) -> float:
    """Seconds in which at least one of these ran, given in the order in which they began.

    >>> at = [Timing(f"2026-01-01T10:{m:02}:00", "", "", "", 60.0 * n) for m, n in ((0, 9), (5, 2))]
    >>> _waited(at), _waited(at[:1]), _waited([*at, Timing("2026-01-02", "", "", "", 60.0)])
    (540.0, 540.0, 600.0)
    """
    total, until = 0.0, -math.inf
    for timing in timings:
        begun = timing.when.timestamp()
        total += max(0.0, begun + timing.seconds - max(begun, until))
        until = max(until, begun + timing.seconds)
    return total

"""Work that tests send to a Ray cluster: modules of tests cannot be imported there."""

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from rankup.runs import process_pool


def double(number: int) -> int:
    process_pool.tell(f"at {number}")
    return 2 * number


def node_of(seconds: float) -> str:
    import ray

    time.sleep(seconds)
    return str(ray.get_runtime_context().get_node_id())


def fail(number: int) -> None:
    raise ValueError(f"{number} is bad")


def leave_at_once(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Meeting(NamedTuple):
    folder: Path
    number: int
    wanted: int


def meet(meeting: Meeting) -> tuple[int, str | None]:
    """How many were there at once, waiting for as many as wanted; and the GPUs of this one."""
    mine, most = meeting.folder / str(meeting.number), 0
    mine.touch()
    until = time.time() + 20
    while most < meeting.wanted and time.time() < until:
        most = max(most, len(list(meeting.folder.iterdir())))
        time.sleep(0.05)
    time.sleep(0.2)  # there may come more
    most = max(most, len(list(meeting.folder.iterdir())))
    mine.unlink()
    return most, os.environ.get("CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class InFolder:
    """Work in a folder: a count that is written one by one, and goes on where it was."""

    folder: Path
    most: int
    dies_at: int = -1
    pause: float = 0
    rest: float = 0  # seconds before it dies

    @property
    def folders(self) -> list[Path]:
        return [self.folder]

    def moved(self, to: Mapping[Path, Path]) -> "InFolder":
        return replace(self, folder=to[self.folder])


def count(work: InFolder) -> list[int]:
    """The numbers that this process has counted."""
    file, mine = work.folder / "deep" / "count", []
    begun = int(file.read_text()) if file.exists() else 0
    for number in range(begun + 1, work.most + 1):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(number))
        mine.append(number)
        if work.pause:
            time.sleep(work.pause)
            process_pool.tell(node_of(0))
        if number == work.dies_at and number != begun:
            time.sleep(work.rest)
            os.kill(os.getpid(), signal.SIGKILL)
    return mine

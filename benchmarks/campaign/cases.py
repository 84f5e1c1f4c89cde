"""A case of the campaign, run in a process of its own under a watchdog."""

import json
import os
import random
import resource
import select
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from campaign.world import World

WRONG, TRACEBACK, HANG, NEWLINE, MEMORY = "wrong", "traceback", "hang", "newline", "memory"
FAULTS = (WRONG, TRACEBACK, HANG, NEWLINE, MEMORY)

CPU_SECONDS = 10  # no case computes for longer than two
IDLE_SECONDS = 10  # nor waits for longer than others take to compute
MOST_MEMORY = 1 << 29  # bytes that a case may take beyond what the campaign has loaded


class Fault(Exception):
    """An outcome that must never be."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text


# Damages a copy of something in an empty folder, uses it, and raises `Fault` if that ends badly.
Work = Callable[["World", random.Random, Path], None]

_notes = [Path()]  # the file for those of the current case


def done(words: str) -> None:
    """Note what a case has done, for whoever reads that it failed."""
    with _notes[0].open("a") as file:
        file.write(f"{words}\n")


@dataclass(frozen=True)
class Case:
    """A case, which its kind, seed and number determine."""

    kind: str
    seed: int
    number: int

    def __str__(self) -> str:
        return f"--only {self.kind} --seed {self.seed} --first {self.number} --cases 1"

    def draw(self) -> random.Random:
        return random.Random(f"{self.kind}/{self.seed}/{self.number}")


@dataclass(frozen=True)
class Outcome:
    fault: str | None  # one of FAULTS
    text: str
    seconds: float


def run_case(case: Case, work: Work, world: "World", folder: Path) -> Outcome:
    """Run a case in a new folder, which is kept if the case fails."""
    folder.mkdir(parents=True)
    started, notes = time.perf_counter(), folder.with_suffix(".txt")
    _notes[0] = notes
    notes.touch()
    fault, text = _watched(lambda: work(world, case.draw(), folder))
    what = "; ".join(notes.read_text().splitlines())
    if fault is None:
        shutil.rmtree(folder, ignore_errors=True)
        notes.unlink()
    return Outcome(fault, f"{what}\n{text}".rstrip(), time.perf_counter() - started)


def _watched(work: Callable[[], None]) -> tuple[str | None, str]:
    before = _resident_now()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.setsid()  # processes that it starts end with it
        _limit_memory()
        os.write(writing, json.dumps(_told(work)).encode()[:60_000])
        os._exit(0)
    os.close(writing)
    said = _read_until(reading, child)
    if said is None:
        os.killpg(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    if said is None:
        return HANG, f"{IDLE_SECONDS} s without an end, idle or computing"
    if not said:
        return TRACEBACK, f"the process died, status {os.waitstatus_to_exitcode(status)}"
    fault, text = json.loads(said)
    taken = used.ru_maxrss * 1024 - before
    if fault is None and taken > MOST_MEMORY:
        return MEMORY, f"it took {taken >> 20} MiB"
    return fault, text


def _told(work: Callable[[], None]) -> tuple[str | None, str]:
    kind, text = None, ""
    try:
        work()
    except Fault as fault:
        kind, text = fault.kind, fault.text[:3000]
    except MemoryError:
        kind, text = MEMORY, traceback.format_exc()[-3000:]
    except BaseException:
        kind, text = TRACEBACK, traceback.format_exc()[-3000:]
    return kind, text


def _read_until(pipe: int, child: int) -> bytes | None:
    """What the child says; None if it takes too long."""
    busy, before = time.monotonic(), 0.0
    try:
        while (now := _computed(child)) < CPU_SECONDS:
            if select.select([pipe], [], [], 0.5)[0]:
                return os.read(pipe, 1 << 20)
            if now > before:
                busy, before = time.monotonic(), now
            if time.monotonic() - busy > IDLE_SECONDS:
                return None
        return None
    finally:
        os.close(pipe)


def _computed(process: int) -> float:
    """Seconds of processor time."""
    spent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, spent)) / os.sysconf("SC_CLK_TCK")


def _resident_now() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _limit_memory() -> None:
    """A bomb must not take the machine with it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            most = int(line.split()[1]) * 1024 + (3 << 30)
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))

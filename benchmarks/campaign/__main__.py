"""Run the campaign for some minutes and print a table of what it found.

cd benchmarks && python -m campaign --minutes 10
cd benchmarks && python -m campaign --only manifests --seed 3 --first 17 --cases 1
"""

import argparse
import math
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from campaign.cases import FAULTS, Case, Outcome, run_case
from campaign.kinds import KINDS, SAMPLE, needs
from campaign.world import World

FOUND = ("silent wrong content", "tracebacks", "hangs", "newlines", "memory")
TITLES = ("kind", "cases", *FOUND, "seconds")


def main() -> int:
    asked = _asked()
    kinds = asked.only or list(KINDS)
    root = Path(tempfile.mkdtemp(prefix="campaign-"))
    world = World(root / "whole", small=asked.sample)
    world.root.mkdir()
    for kind in kinds:
        world.make(needs(kind, world))
    tally = Tally()
    end = time.monotonic() + 60 * asked.minutes
    number = asked.first
    while time.monotonic() < end and (due := [k for k in kinds if number < _last(k, asked)]):
        for kind in due:
            case = Case(kind, asked.seed, number)
            folder = root / f"{kind}-{asked.seed}-{number}"
            outcome = run_case(case, KINDS[kind], world, folder)
            tally.add(kind, outcome)
            if outcome.fault:
                small = " --sample" if asked.sample else ""
                print(f"{outcome.fault}: {case}{small} ({folder})\n{outcome.text}\n", flush=True)
            elif asked.verbose:
                print(f"{case}: {outcome.text}", flush=True)
        number += 1
    tally.print_table(kinds)
    if not tally.faults:
        shutil.rmtree(root)
    return 1 if tally.faults else 0


def _last(kind: str, asked: argparse.Namespace) -> float:
    """The number at which a kind of cases ends."""
    most = SAMPLE[kind] if asked.sample else math.inf
    return asked.first + min(most, math.inf if asked.cases is None else asked.cases)


@dataclass
class Tally:
    """Outcomes by kind."""

    cases: Counter[str] = field(default_factory=Counter)
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, outcome: Outcome) -> None:
        self.cases[kind] += 1
        self.seconds[kind] += outcome.seconds
        if outcome.fault:
            self.faults[kind, outcome.fault] += 1

    def print_table(self, kinds: list[str]) -> None:
        _print_row(TITLES)
        for kind in kinds:
            found = [str(self.faults[kind, fault]) for fault in FAULTS]
            _print_row((kind, str(self.cases[kind]), *found, f"{self.seconds[kind]:.0f}"))


def _print_row(cells: Iterable[str]) -> None:
    print("  ".join(f"{c:>{max(9, len(t))}}" for c, t in zip(cells, TITLES, strict=True)))


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m campaign", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=KINDS, help="kinds; all by default")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--cases", type=int, help="of each kind, at most")
    parser.add_argument("--sample", action="store_true", help="a few cases of each on few methods")
    parser.add_argument("--verbose", action="store_true", help="a line for every case")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

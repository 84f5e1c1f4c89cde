"""A fixed sample of the campaign of damage: `make campaign` runs ten minutes of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
KINDS = ("flips", "zeros", "rivals", "files", "manifests", "kills", "saves", "full", "races")

# Where processes fork, and tell what they take.
pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")


def campaign(*words: str, code: str = "") -> str:
    """What a campaign says that found nothing, or some code that uses its modules."""
    path = os.pathsep.join((str(BENCHMARKS), *sys.path))
    program = ["-c", code] if code else ["-m", "campaign"]
    done = subprocess.run(
        [sys.executable, *program, *words],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_no_damage_ends_in_silence_or_a_traceback() -> None:
    table = campaign("--sample")
    assert [line.split()[0] for line in table.splitlines()] == ["kind", *KINDS]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_cases_of_a_kind(kind: str) -> None:
    campaign("--only", kind, "--cases", "60", "--seed", "1")


BAD_ENDINGS = """
import os, sys, time
from pathlib import Path
from campaign import cases
from campaign.cases import Case, Fault, run_case

cases.IDLE_SECONDS = 1

def fails(world, draw, folder):
    raise Fault(cases.WRONG, "other content")

def breaks(world, draw, folder):
    raise KeyError("a name")

def waits(world, draw, folder):
    time.sleep(60)

def takes(world, draw, folder):
    bytes(bytearray(range(256)) * (1 << 22))

def dies(world, draw, folder):
    os.abort()

def ends(world, draw, folder):
    pass

for number, work in enumerate((fails, breaks, waits, takes, dies, ends)):
    folder = Path(sys.argv[1]) / str(number)
    print(run_case(Case("x", 0, number), work, None, folder).fault, folder.exists())
"""


def test_campaign_notices_bad_endings(tmp_path: Path) -> None:
    said = campaign(str(tmp_path), code=BAD_ENDINGS).splitlines()
    faults = ["wrong", "traceback", "hang", "memory", "traceback"]
    assert said == [*(f"{fault} True" for fault in faults), "None False"]

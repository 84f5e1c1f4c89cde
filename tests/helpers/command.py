"""The command line in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ENV = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(sys.path),
    "COLUMNS": "80",
    "OMP_NUM_THREADS": "1",
    "RANKUP_DATA": "",
}


def rankup(*arguments: object, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rankup", *map(str, arguments)]
    return subprocess.run(command, env={**ENV, **env}, cwd=cwd, capture_output=True, text=True)

"""What the benchmarks share: how a result is written down."""

import datetime
import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def write_result(
    name: str,
    measured: Mapping[str, object],
    *,
    threads: str,
    versions: Mapping[str, object] | None = None,
    folder: Path = RESULTS,
) -> Path:
    """Write `NAME-DATE.json`: when, where, with what and how it was measured, then the numbers."""
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {threads} threads",
        "versions": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            **(versions or {}),
        },
        "command": " ".join(["python", *sys.argv]),
        **measured,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{result['date']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path

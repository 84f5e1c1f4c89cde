"""Shared by the benchmarks: how a result is written."""

import datetime
import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def write_result(
    name: str,
    measured: Mapping[str, object],
    *,
    threads: str,
    versions: Mapping[str, object] | None = None,
    folder: Path = RESULTS,
    merge: bool = False,
) -> Path:
    """Write `NAME-DATE.json`: when, where, with what and how it was measured, then the numbers.

    With `merge`, earlier measurements of the same day are kept, unless measured again.
    """
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": ", ".join([*_gpu(), platform.processor() or platform.machine()])
        + f", {threads} threads",
        "versions": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            **(versions or {}),
        },
        "command": " ".join(["python", *_without_out(sys.argv)]),
        **measured,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{result['date']}.json"
    if merge and path.exists():
        result = _merged(json.loads(path.read_text()), result)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"


def wait(device: str) -> None:
    """Wait until the device has finished all its work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _without_out(words: list[str]) -> list[str]:
    """A command line without its output folder, which is specific to the machine.

    >>> _without_out(["gpu.py", "--only", "steps", "--out", "there"])
    ['gpu.py', '--only', 'steps']
    """
    at = words.index("--out") if "--out" in words else len(words)
    return words[:at] + words[at + 2 :]


def _gpu() -> list[str]:
    return [torch.cuda.get_device_name()] if torch.cuda.is_available() else []


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: _merged(old[key], new[key])
        for key in old.keys() & new.keys()
        if isinstance(old[key], dict) and isinstance(new[key], dict)
    }
    return old | new | both

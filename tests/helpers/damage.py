"""Damage to files, as disks and people do it."""

import json
from pathlib import Path
from typing import Any

from rankup.runs.seal import seal_again


def flip_bit(path: Path, position: int, bit: int = 0) -> None:
    """Flip one bit of a byte of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def edit_config(run: Path, **settings: Any) -> None:
    """Change settings of a run on purpose, and seal it again."""
    path = run / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    seal_again(run)

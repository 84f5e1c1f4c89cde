"""Checkpoints in the folders of runs.

checkpoint.safetensors   the last one, with the indices of its task and its epoch
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import safetensors
import safetensors.torch

from rankup.training.checkpoint import Checkpoint

CHECKPOINT = "checkpoint.safetensors"
SHARE = 50  # checkpoints and progress reports each take at most 1/SHARE of the time


class Checkpoints:
    """Writes checkpoints of runs that learn together, seldom enough to cost little.

    After an epoch either all runs' checkpoints are written or none, as runs can only resume
    together from the same epoch.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self.note = note
        self._epoch: tuple[int, int] | None = None  # task and epoch that `_due` was decided for
        self._due = False
        self._written, self._cost = 0.0, 0.0
        self._failed = False

    def keep(self, out: Path, task: int, checkpoint: Checkpoint) -> None:
        """Write it to a run's folder, if one is due."""
        now = time.perf_counter()
        if self._epoch != (task, checkpoint.epoch):
            self._epoch = task, checkpoint.epoch
            self._due = now - self._written >= SHARE * self._cost
            self._cost = 0.0 if self._due else self._cost
        if not self._due:
            return
        try:
            write_checkpoint(out, task, checkpoint)
        except OSError as error:  # there may be room again after the next epoch
            if not self._failed:
                self.note(
                    f"cannot write a checkpoint to {out}: {error.strerror or error}; if the run is "
                    "stopped now, what it learned of this task since the last checkpoint is lost"
                )
            self._failed = True
        self._written = time.perf_counter()
        self._cost += self._written - now


def write_checkpoint(out: Path, task: int, checkpoint: Checkpoint) -> None:
    # Renamed into place, so that a killed process leaves the old one; not synced to disk, because
    # only an epoch is at stake.
    at = {"task": task, "epoch": checkpoint.epoch, "seconds": checkpoint.seconds}
    about = {"at": json.dumps(at)}
    state = {name: tensor.contiguous() for name, tensor in checkpoint.state.items()}
    temporary = out / f".{CHECKPOINT}.tmp"
    try:
        temporary.write_bytes(safetensors.torch.save(state, about))
        os.replace(temporary, out / CHECKPOINT)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_checkpoint(out: Path, task: int, note: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint of a task, if there is one; an unreadable one counts as none."""
    path = out / CHECKPOINT
    if not path.exists():
        return None
    try:
        with safetensors.safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["at"])
            of, epoch = int(about["task"]), int(about["epoch"])
            seconds = float(about.get("seconds", 0))
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        note(f"{path} cannot be read, so its task starts over: {reason}")
        return None
    # One left from an earlier task is of no use for this one.
    return Checkpoint(epoch, state, seconds=seconds) if of == task else None

"""Checkpoints in a run's folder: the state of the open task after an epoch, sealed."""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from rankup.errors import RankupError
from rankup.layers import Tensors
from rankup.storage.atomic import temporary_of
from rankup.storage.seal import FORMAT, seal
from rankup.training.checkpoint import Checkpoint
from rankup.utils.files import read_regular

CHECKPOINT = "checkpoint.safetensors"
SHARE = 50  # checkpoints and progress reports each take at most 1/SHARE of the time

_LARGEST = 1 << 32  # bytes; a ResNet18 with its optimiser takes 130 million
_OLD_KEYS = {"task", "epoch", "seconds"}  # of what version 0.1 wrote, which has no seal
# Errors that reading other bytes than a checkpoint may raise.
_NOT_A_CHECKPOINT = (
    *(safetensors.SafetensorError, LookupError, AttributeError, TypeError, ValueError),
    *(OverflowError, RecursionError, RuntimeError),
)


@dataclass(frozen=True)
class OpenTask:
    """Identifies the open task of a run, so that no other one resumes from its checkpoint."""

    index: int
    name: str
    seed: int
    recipe: Mapping[str, Any]


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

    def keep(self, out: Path, task: OpenTask, checkpoint: Checkpoint) -> None:
        """Write a checkpoint to a run's folder, if one is due."""
        now = time.perf_counter()
        if self._epoch != (task.index, checkpoint.epoch):
            self._epoch = task.index, checkpoint.epoch
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


def write_checkpoint(out: Path, task: OpenTask, checkpoint: Checkpoint) -> None:
    """Replace the checkpoint in a run's folder."""
    # Renamed into place, so that a killed process leaves the old one. Not synced to disk, because
    # only an epoch would be lost.
    state = {name: tensor.contiguous() for name, tensor in checkpoint.state.items()}
    about = {"task": asdict(task), "epoch": checkpoint.epoch, "seconds": checkpoint.seconds}
    # Version 0.1 used another key, so that damage cannot turn this into one of its checkpoints.
    metadata = {
        "format": str(FORMAT),
        "about": json.dumps(about),
        "sha256": _seal(about, state),
    }
    temporary = temporary_of(out / CHECKPOINT)
    try:
        temporary.unlink(missing_ok=True)  # it may be a pipe, which would hang
        temporary.write_bytes(safetensors.torch.save(state, metadata))
        os.replace(temporary, out / CHECKPOINT)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_checkpoint(out: Path, task: OpenTask, note: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint of a task; None if there is none that can be used.

    Args:
        note: called with a message about one that cannot be used.
    """
    path = out / CHECKPOINT
    try:
        stored = _read(path)
        if stored is None or stored.index != task.index:  # left from an earlier task
            return None
        if stored.task is not None and seal(stored.task) != seal(asdict(task)):
            raise RankupError("it is of another task, seed or recipe")
    except RankupError as error:
        note(f"{path} cannot be used, so its task starts over: {error}")
        return None
    if stored.task is None:
        note(f"{path} was written by version 0.1 and has no seal: if it is damaged, nothing tells")
    return Checkpoint(stored.epoch, stored.state, seconds=stored.seconds)


def checkpoint_problems(out: Path) -> list[str]:
    """The problems of a run's checkpoint, a sentence each; empty if it is fine or there is none."""
    try:
        _read(out / CHECKPOINT)
    except RankupError as error:
        return [f"{out / CHECKPOINT} cannot be used: {error}"]
    return []


@dataclass(frozen=True)
class _Stored:
    """The content of a checkpoint's file."""

    index: int  # of its task
    epoch: int
    seconds: float
    state: Tensors
    task: Mapping[str, Any] | None  # None if version 0.1 wrote it


def _read(path: Path) -> _Stored | None:
    """The content of a checkpoint's file; None if there is no such file."""
    try:
        content = read_regular(path, _LARGEST)
        state = safetensors.torch.load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        metadata = header["__metadata__"]
        if metadata.keys() == {"at"}:
            return _without_seal(json.loads(metadata["at"]), state)
        about = json.loads(metadata["about"])
        if metadata["format"] != str(FORMAT) or metadata["sha256"] != _seal(about, state):
            raise RankupError("it does not match its seal")
        return _Stored(
            about["task"]["index"], about["epoch"], about["seconds"], state, about["task"]
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except RankupError:
        raise
    except OSError as error:
        raise RankupError(str(error.strerror)) from error
    except _NOT_A_CHECKPOINT as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        readable = "".join(char if char.isprintable() else "?" for char in reason)
        raise RankupError(f"it is damaged: {readable}") from error


def _without_seal(at: Any, state: Tensors) -> _Stored:
    """What version 0.1 wrote."""
    if at.keys() != _OLD_KEYS:
        raise RankupError("it does not say which task it is of")
    seconds = float(at["seconds"])
    if not 0 <= seconds < math.inf:
        raise RankupError(f"its task has taken {seconds} seconds")
    return _Stored(int(at["task"]), int(at["epoch"]), seconds, state, None)


def _seal(about: Mapping[str, Any], state: Tensors) -> str:
    """The SHA-256 of everything in a checkpoint."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return seal({"about": about, "tensors": digest.hexdigest()})

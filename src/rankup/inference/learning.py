"""Learning tasks from zips that are uploaded through the page, each in a process of its own."""

import asyncio
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

from rankup.data.inputs import ImageInput
from rankup.errors import RankupError
from rankup.inference.limits import Limits, Refused
from rankup.inference.served import Snapshot
from rankup.inference.uploads import unpack_images
from rankup.net.tasks import checked_name

_REMEMBERED = 20  # tasks whose progress is reported
_MOST_EPOCHS = 1000
_ENDS = ("done", "failed")  # the last stages
_COMMAND = (sys.executable, "-m", "rankup.inference.learn_images")


class Learning:
    """Learns one task at a time.

    Args:
        folder: of the network.
        limits: of the server.
    """

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.folder, self.limits = folder, limits
        self._progress: dict[str, dict[str, Any]] = {}  # by task, the newest last
        self._running: asyncio.Task[None] | None = None

    def progress(self) -> list[dict[str, Any]]:
        """For each task its stage, its losses and, in the end, its accuracy or error; the newest
        task first."""
        return list(reversed(self._progress.values()))

    async def begin(
        self, name: str, archive: BinaryIO, now: Snapshot, options: dict[str, str | None]
    ) -> dict[str, Any]:
        """Unpack a zip and start to learn from it; returns the task's progress."""
        checked_name(name, now.tasks)
        epochs = _epochs(options["epochs"])
        if not isinstance(now.net.inputs, ImageInput):
            raise RankupError("the network does not take images, and only these are taught here")
        if self._running is not None:
            raise Refused(409, "another task is being learned: wait until it is done")
        state = self._progress[name] = {"name": name, "stage": "unpacking", "losses": []}
        # Set before anything is awaited, so that there is never a second one.
        self._running = asyncio.current_task()
        images = Path(tempfile.mkdtemp(prefix="rankup-learn-"))
        try:
            state["counts"] = await asyncio.to_thread(unpack_images, archive, images)
        except BaseException:
            shutil.rmtree(images, ignore_errors=True)
            self._running = None
            del self._progress[name]
            raise
        while len(self._progress) > _REMEMBERED:
            del self._progress[next(iter(self._progress))]
        self._running = asyncio.create_task(self._learn(name, images, epochs, state))
        return state

    async def close(self) -> None:
        """Stop learning. The network's folder stays as it is."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def _learn(
        self, name: str, images: Path, epochs: int | None, state: dict[str, Any]
    ) -> None:
        process = None
        try:
            words = [*_COMMAND, str(self.folder), str(images), name]
            process = await asyncio.create_subprocess_exec(
                *words,
                *([] if epochs is None else [str(epochs)]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            assert process.stdout is not None
            async for line in process.stdout:
                _update(state, line)
                if state["stage"] in _ENDS:  # all is saved; its own end may take a second
                    break
            else:
                state |= {"stage": "failed", "error": "the process that learned it has died"}
        finally:
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()
            shutil.rmtree(images, ignore_errors=True)
            self._running = None


def _update(state: dict[str, Any], line: bytes) -> None:
    try:
        message = json.loads(line)
    except ValueError:  # a library's own words
        return
    if (loss := message.pop("loss", None)) is not None:
        state["losses"].append(round(loss, 5))
    state |= message


def _epochs(given: str | None) -> int | None:
    if not given:
        return None
    if not given.isascii() or not given.isdigit() or not 1 <= int(given) <= _MOST_EPOCHS:
        raise RankupError(
            f"epochs must be a whole number from 1 to {_MOST_EPOCHS}, got {given[:20]!r}"
        )
    return int(given)

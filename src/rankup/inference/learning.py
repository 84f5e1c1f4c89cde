"""Tasks that are added through the page: a zip is unpacked, and a process of its own learns from
it."""

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

_REMEMBERED = 20  # tasks whose progress is told
_MOST_EPOCHS = 1000
_ENDS = ("done", "failed")  # stages
_COMMAND = (sys.executable, "-m", "rankup.inference.learn_images")


class Learning:
    """Learns one task at a time.

    Args:
        folder: of the network.
    """

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.folder, self.limits = folder, limits
        self._told: dict[str, dict[str, Any]] = {}  # by task, the newest last
        self._running: asyncio.Task[None] | None = None

    def progress(self) -> list[dict[str, Any]]:
        """For each task its stage, its curve of losses and, in the end, its accuracy or what went
        wrong; the newest first."""
        return list(reversed(self._told.values()))

    async def begin(
        self, name: str, archive: BinaryIO, now: Snapshot, options: dict[str, str | None]
    ) -> dict[str, Any]:
        """Begin to learn a task, or raise if it cannot be."""
        checked_name(name, now.tasks)
        epochs = _epochs(options["epochs"])
        if not isinstance(now.net.inputs, ImageInput):
            raise RankupError("the network does not take images, and only these are taught here")
        if self._running is not None:
            raise Refused(409, "another task is being learned: wait until it is done")
        told = self._told[name] = {"name": name, "stage": "unpacking", "losses": []}
        # Set before anything is awaited, so that there is never a second one.
        self._running = asyncio.current_task()
        images = Path(tempfile.mkdtemp(prefix="rankup-learn-"))
        try:
            told["counts"] = await asyncio.to_thread(unpack_images, archive, images)
        except BaseException:
            shutil.rmtree(images, ignore_errors=True)
            self._running = None
            del self._told[name]
            raise
        while len(self._told) > _REMEMBERED:
            del self._told[next(iter(self._told))]
        self._running = asyncio.create_task(self._learn(name, images, epochs, told))
        return told

    async def close(self) -> None:
        """End what is being learned; the network's folder stays whole."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def _learn(
        self, name: str, images: Path, epochs: int | None, told: dict[str, Any]
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
                _take_up(told, line)
                if told["stage"] in _ENDS:  # all is saved; its own end may take a second
                    break
            else:
                told |= {"stage": "failed", "error": "the process that learned it has died"}
        finally:
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()
            shutil.rmtree(images, ignore_errors=True)
            self._running = None


def _take_up(told: dict[str, Any], line: bytes) -> None:
    try:
        message = json.loads(line)
    except ValueError:  # a library's own words
        return
    if (loss := message.pop("loss", None)) is not None:
        told["losses"].append(round(loss, 5))
    told |= message


def _epochs(given: str | None) -> int | None:
    if not given:
        return None
    if not given.isascii() or not given.isdigit() or not 1 <= int(given) <= _MOST_EPOCHS:
        raise RankupError(
            f"epochs must be a whole number from 1 to {_MOST_EPOCHS}, got {given[:20]!r}"
        )
    return int(given)

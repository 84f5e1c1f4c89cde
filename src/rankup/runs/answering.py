"""What the network of a run sees in images of anyone's."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rankup.data.decode import pixels_of, progress_bar, words_for
from rankup.data.errors import DataError
from rankup.data.streams import stream_info
from rankup.errors import RankupError
from rankup.feed import as_floats, as_inputs
from rankup.layout import for_answers
from rankup.manifest import Manifest
from rankup.runs.files import CONFIG, NET, read_config, read_lines, recipe_of, setting
from rankup.store import load

_TOGETHER = 256  # images


class Seen(NamedTuple):
    """A class that an image may be of."""

    name: str
    probability: float


class TaughtTask(NamedTuple):
    """A task of a run, and what its classes are called."""

    name: str
    class_names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name!r} ({', '.join(self.class_names)})"


def what_is_seen(run: Path, task: str | None, files: Sequence[Path]) -> list[list[Seen]]:
    """The classes of a task for each image, the likeliest first.

    Args:
        run: the folder of a run that has learned its stream's classes in parts.
        task: the name of a task, or its number from 1 on; None where there is but one.
    """
    path = run / CONFIG
    config = read_config(path)
    info = stream_info(setting(path, config, "stream", str))
    if info.kind != "split":
        raise RankupError(
            f"{run} has learned {config['stream']}, in which each task changes the images in its "
            "own way: images of yours are none of these"
        )
    manifest = Manifest.read(run / NET)
    asked = _asked_for(_known_tasks(run, manifest), task, run)
    recipe = recipe_of(setting(path, config, "recipe", dict))
    inputs = _read(files, info.side, manifest)
    net = load(run / NET)
    seen = []
    for part in torch.split(inputs, _TOGETHER):
        x = as_inputs(as_floats(part, net.dtype), recipe, net.dtype)
        with torch.no_grad():
            shares = net(for_answers(net.body, x), task=asked.name).softmax(1)
        for row in shares:
            order = row.argsort(descending=True).tolist()
            seen.append([Seen(asked.class_names[index], float(row[index])) for index in order])
    return seen


def _known_tasks(run: Path, manifest: Manifest) -> list[TaughtTask]:
    lines = {line["task"]: line.get("classes") for line in read_lines(run)}
    return [
        TaughtTask(task.name, tuple(lines.get(task.name) or map(str, range(task.classes))))
        for task, _ in manifest.tasks
    ]


def _asked_for(known: Sequence[TaughtTask], task: str | None, run: Path) -> TaughtTask:
    by_number = {str(number): each for number, each in enumerate(known, start=1)}
    by_name = by_number | {each.name: each for each in known}  # which counts more than a number
    if task is None and len(known) == 1:
        return known[0]
    if task in by_name:
        return by_name[task]
    listed = ", ".join(map(str, known))
    if task is None:
        raise RankupError(f"{run} knows {len(known)} tasks, name one with --task: {listed}")
    raise RankupError(f"{run} knows no task {task!r}, only {listed}")


def _read(files: Sequence[Path], side: int | None, manifest: Manifest) -> Tensor:
    """The images as bytes, `[N, C, H, W]`."""
    arrays = []
    with progress_bar("images", len(files), show=True) as advance:
        for file in files:
            try:
                content = file.read_bytes()
            except OSError as error:
                raise DataError(f"{file} cannot be read: {error.strerror}") from error
            array = pixels_of(content, str(file), side)
            if not _fits(array.shape, manifest):
                raise DataError(
                    f"{file}: the image is {words_for(array.shape)}, which the run's were not"
                )
            arrays.append(array)
            advance(1)
    return torch.from_numpy(np.stack(arrays))


def _fits(shape: tuple[int, ...], manifest: Manifest) -> bool:
    options = manifest.model["options"]
    if manifest.model["model"] == "mlp":
        return bool(np.prod(shape) == options["inputs"])
    # As `make_module` tells the network: of an image's sides, its width alone.
    return (shape[0], shape[-1]) == (options["channels"], options["image_size"])

"""Predicting the classes of images by the network of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rankup.data.decode import pixels_of, words_for
from rankup.data.encoded import Pixels, read_image
from rankup.data.inputs import ImageInput, Input, from_json
from rankup.data.streams import stream_info
from rankup.data.transforms import Scaling
from rankup.errors import DataError, RankupError
from rankup.runs.records import (
    CONFIG,
    METRICS,
    NET,
    no_setting,
    read_config,
    read_lines,
    recipe_of,
    setting,
)
from rankup.storage.manifest import Manifest
from rankup.storage.store import load
from rankup.training.batches import as_floats, as_inputs
from rankup.training.memory_format import for_answers
from rankup.utils.progress import progress_bar

_TOGETHER = 256  # images
# What a recipe does to pixels from 0 to 1, as a mean to subtract and a deviation to divide by.
_SCALED = {"unit": ((0.0,), (1.0,)), "centred": ((0.5,), (0.5,)), "raw": ((0.0,), (1 / 255,))}

Shape = tuple[int, int, int]  # of an image: channels, height and width


class Prediction(NamedTuple):
    """A class that an image may be of."""

    name: str
    probability: float


class TaughtTask(NamedTuple):
    """A task of a run, and what its classes are called."""

    name: str
    class_names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name!r} ({', '.join(self.class_names)})"


def predict_classes(run: Path, task: str | None, files: Sequence[Path]) -> list[list[Prediction]]:
    """The classes of a task for each image, the likeliest first.

    Args:
        run: the folder of a run that has learned its stream's classes in parts.
        task: the name of a task, or its number from 1 on; None if there is only one.
    """
    path = run / CONFIG
    config = read_config(path)
    info = stream_info(setting(path, config, "stream", str))
    if info.kind != "split":
        raise RankupError(
            f"{run} has learned {config['stream']}, in which each task changes the images in its "
            "own way: your images are not changed like that"
        )
    scaling = _scaling(path, config)
    manifest = Manifest.read(run / NET)
    asked = _asked_for(_known_tasks(run, manifest), task, run)
    recipe = recipe_of(setting(path, config, "recipe", dict))
    inputs = _read(files, info.side, _image_shape(path, config))
    net = load(run / NET)
    names, predictions = asked.class_names, []
    for batch in torch.split(inputs, _TOGETHER):
        floats = as_floats(batch, net.dtype)
        x = as_inputs(floats if scaling is None else scaling(floats), recipe, net.dtype)
        with torch.no_grad():
            shares = net(for_answers(net.body, x), task=asked.name).softmax(1)
        for row in shares:
            order = row.argsort(descending=True).tolist()
            predictions.append([Prediction(names[index], float(row[index])) for index in order])
    return predictions


def inputs_of_run(run: Path) -> Input | None:
    """How a run's inputs were prepared; None where that cannot be said of one's own, such as if
    every task permutes its pixels."""
    path = run / CONFIG
    config = read_config(path)
    if stream_info(setting(path, config, "stream", str)).kind != "split":
        return None
    if config.get("preprocessing") is not None:
        inputs = from_json(config["preprocessing"])
        if not isinstance(inputs, ImageInput):
            return inputs
    channels, height, width = _image_shape(path, config)
    pixels, scaling = (
        recipe_of(setting(path, config, "recipe", dict)).pixels,
        _scaling(path, config),
    )
    if height != width or channels not in (1, 3) or (scaling and pixels != "unit"):
        return None
    mean, std = (scaling.mean, scaling.std) if scaling else _SCALED[pixels]
    return ImageInput(height, 1 if channels == 1 else 3, mean=mean, std=std)


def _known_tasks(run: Path, manifest: Manifest) -> list[TaughtTask]:
    lines = {line["task"]: line.get("classes") for line in read_lines(run)}
    known = []
    for task, _ in manifest.tasks:
        if task.name not in lines:
            raise RankupError(
                f"{run / METRICS} lacks task {task.name!r}, which {NET}/ has, and with it the "
                f"names of its classes: `rankup run --resume --out {run}` adds it"
            )
        known.append(
            TaughtTask(task.name, tuple(lines[task.name] or map(str, range(task.classes))))
        )
    return known


def _asked_for(known: Sequence[TaughtTask], task: str | None, run: Path) -> TaughtTask:
    by_number = {str(number): taught for number, taught in enumerate(known, start=1)}
    by_name = by_number | {taught.name: taught for taught in known}  # names take precedence
    if task is None and len(known) == 1:
        return known[0]
    if task in by_name:
        return by_name[task]
    listed = ", ".join(map(str, known))
    if task is None:
        raise RankupError(f"{run} knows {len(known)} tasks; name one with --task: {listed}")
    raise RankupError(f"{run} knows no task {task!r}, only {listed}")


def _scaling(path: Path, config: dict[str, Any]) -> Scaling | None:
    """How the images of the run were scaled for a published network; None if they were not."""
    if (given := config.get("preprocessing")) is None:
        return None
    try:
        inputs = from_json(given)
    except DataError as error:
        raise no_setting(path, "preprocessing", given, f"that of an input: {error}") from None
    if not isinstance(inputs, ImageInput):
        raise RankupError(f"{path.parent} has learned from {inputs}, not from images")
    return Scaling(inputs.mean, inputs.std)


def _image_shape(path: Path, config: dict[str, Any]) -> Shape:
    match config.get("inputs"):
        case [int(channels), int(height), int(width)]:
            return channels, height, width
        case other:
            raise no_setting(path, "inputs", other, "an image's channels, height and width")


def _read(files: Sequence[Path], side: int | None, shape: Shape) -> Tensor:
    """The images as bytes, `[N, C, H, W]`."""
    arrays = []
    with progress_bar("images", len(files), show=True) as advance:
        for file in files:
            array = _pixels_like(shape, read_image(file), str(file), side)
            if array.shape != shape:
                raise DataError(
                    f"{file}: the image is {words_for(array.shape)}, but the run's were "
                    f"{words_for(shape)}"
                )
            arrays.append(array)
            advance(1)
    return torch.from_numpy(np.stack(arrays))


def _pixels_like(shape: Shape, content: bytes, file: str, side: int | None) -> Pixels:
    """An image read like those of the run; if its shape differs and they were square and RGB,
    scaled to their size as `split:PATH@SIZE` would."""
    channels, height, width = shape
    scalable = side is None and channels == 3 and height == width
    try:
        array = pixels_of(content, file, side)
    except DataError:  # such as for an image with an alpha channel
        if not scalable:
            raise
        return pixels_of(content, file, height)
    return pixels_of(content, file, height) if scalable and array.shape != shape else array

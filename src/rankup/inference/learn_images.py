"""A process of its own that teaches a network a folder of images: `fit` puts a network into
training mode for all threads, so the one that answers is left alone.

    python -m rankup.inference.learn_images NETWORK IMAGES NAME [EPOCHS]

It tells its progress as lines of JSON, and saves the task to the network's folder at the end.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankup.data.folders import find
from rankup.data.inputs import ImageInput
from rankup.data.tasks import Task
from rankup.errors import RankupError, plain_warnings
from rankup.storage.store import load, save
from rankup.training.fit import accuracy, default_recipe, fit
from rankup.training.loop import Epoch

_MOST_NUMBERS = 1 << 30  # of all images, as float32


def learn_images(folder: Path, images: Path, name: str, epochs: int | None) -> None:
    net = load(folder)
    inputs = net.inputs
    if not isinstance(inputs, ImageInput):
        raise RankupError("the network does not take images: this page teaches images only")
    found = find(images)
    if found is None:
        raise RankupError("no images were found")
    numbers = len(found.files) * inputs.channels * inputs.size**2
    if numbers > _MOST_NUMBERS:
        raise RankupError(
            f"{len(found.files):,} images of {inputs.size}×{inputs.size} pixels are too many for "
            "the page: use the command line"
        )
    tell(stage="reading", classes=list(found.classes), images=len(found.files))
    train_x, train_y = _read(found.train, inputs)
    test_x, test_y = _read(found.test, inputs)
    task = Task(
        name, len(found.classes), train_x, train_y, test_x, test_y, class_names=found.classes
    )
    recipe = default_recipe(net, task)
    if epochs is not None:
        recipe = replace(recipe, epochs=epochs)

    def on_epoch(now: Epoch, _: Any) -> None:
        tell(stage="learning", epoch=now.number, epochs=now.epochs, loss=now.loss)

    tell(stage="learning", epoch=0, epochs=recipe.epochs)
    fit(net, task, recipe, on_epoch=on_epoch)
    tested = accuracy(net, task, recipe)
    net.annotate(name, class_names=found.classes, accuracy=tested)
    tell(stage="saving")
    save(net, folder)
    tell(stage="done", accuracy=tested)


def _read(pictures: tuple[tuple[Path, int], ...], inputs: ImageInput) -> tuple[Tensor, Tensor]:
    rows = [inputs.batch([file])[0] for file, _ in pictures]
    return torch.stack(rows), torch.tensor([label for _, label in pictures])


def tell(**message: object) -> None:
    print(json.dumps(message), flush=True)


def main() -> None:
    plain_warnings()
    folder, images, name, *epochs = sys.argv[1:]
    try:
        learn_images(Path(folder), Path(images), name, int(epochs[0]) if epochs else None)
    except RankupError as error:
        # Without the folder of the upload, which tells the one who asked nothing.
        tell(stage="failed", error=str(error).replace(f"{images}/", ""))
        sys.exit(1)


if __name__ == "__main__":
    main()

"""Teaching a network a folder of images, in a process of its own: `fit` puts a network into
training mode for all threads, so it must not be the one that the server answers with.

    python -m rankup.inference.learn_images NETWORK IMAGES NAME [EPOCHS]

It prints its progress as lines of JSON, and saves the task to the network's folder at the end.
"""

import json
import sys
from pathlib import Path

from rankup.data.inputs import ImageInput
from rankup.errors import RankupError, plain_warnings
from rankup.life.learning import Progress, learn
from rankup.life.samples import find
from rankup.net.tasks import checked_name
from rankup.storage.store import load, save

_MOST_NUMBERS = 1 << 30  # of all images


def learn_images(folder: Path, images: Path, name: str, epochs: int | None) -> None:
    net = load(folder)
    inputs = net.inputs
    if not isinstance(inputs, ImageInput):
        raise RankupError("the network does not take images: this page teaches images only")
    checked_name(name, net.tasks)
    found = find(images, inputs)
    if len(found) * inputs.channels * inputs.size**2 > _MOST_NUMBERS:
        raise RankupError(
            f"{len(found):,} images of {inputs.size}×{inputs.size} pixels are too many for the "
            "page: use the command line"
        )
    tell(stage="reading", classes=list(found.classes), images=len(found))

    def hear(now: Progress) -> None:
        if now.stage == "learning":
            loss = {} if now.loss is None else {"loss": now.loss}
            tell(stage=now.stage, epoch=now.done, epochs=now.total, **loss)

    options = {} if epochs is None else {"epochs": epochs}
    learned = learn(net, name, found, inputs, tell=hear, recipe_options=options)
    tell(stage="saving")
    save(net, folder)
    tell(stage="done", accuracy=learned.accuracy)


def tell(**message: object) -> None:
    print(json.dumps(message), flush=True)


def main() -> None:
    plain_warnings()
    folder, images, name, *epochs = sys.argv[1:]
    try:
        learn_images(Path(folder), Path(images), name, int(epochs[0]) if epochs else None)
    except RankupError as error:
        # Without the folder of the upload, which means nothing to the user.
        sentence = str(error).replace(f"{images}/", "").replace(images, "the zip")
        tell(stage="failed", error=sentence)
        sys.exit(1)


if __name__ == "__main__":
    main()

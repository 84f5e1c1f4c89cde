"""Sources: data sets as arrays, before they become streams of tasks."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rankup.errors import DataError

if TYPE_CHECKING:
    from rankup.data.inputs import TextInput

# Without splits, one in this many images of a class is for testing.
TEST_EVERY = 5


@dataclass(frozen=True, eq=False)
class Split:
    """Images or texts and their classes. The arrays may be read-only memory maps."""

    x: npt.NDArray[np.uint8] | npt.NDArray[np.int64]  # [N, C, H, W], or token ids [N, L]
    y: npt.NDArray[np.int64]  # [N]


@dataclass(frozen=True, eq=False, repr=False)
class Source:
    """A data set of images, or of texts as token ids, with a training and a test split.

    Attributes:
        tasks: the classes of each task by its name, if the data set divides them into tasks.

    >>> digits()
    Source('digits', 10 classes, 1,442 training and 355 test images of 1×8×8)
    """

    name: str
    train: Split
    test: Split
    class_names: tuple[str, ...]
    tasks: Mapping[str, list[int]] = field(default_factory=dict)

    @property
    def items(self) -> str:
        return "images" if self.train.x.dtype == np.uint8 else "texts"

    def __repr__(self) -> str:  # without its pixels
        size = "×".join(map(str, self.train.x.shape[1:]))
        size += " tokens" if self.items == "texts" else ""
        count = f"{len(self.train.y):,} training and {len(self.test.y):,} test {self.items}"
        return f"Source({self.name!r}, {len(self.class_names)} classes, {count} of {size})"


def digits() -> Source:
    """scikit-learn's 8×8 digits: 1,797 images, every fifth of each class for testing.

    >>> digits().train.x.shape, digits().test.x.shape
    ((1442, 1, 8, 8), (355, 1, 8, 8))
    """
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    data, target = load_digits(return_X_y=True)
    x = np.round(data * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    y = target.astype(np.int64)
    tested = np.array(every_fifth(y))
    names = tuple(map(str, range(10)))
    return Source("digits", Split(x[~tested], y[~tested]), Split(x[tested], y[tested]), names)


def every_fifth(labels: npt.NDArray[np.int64]) -> list[bool]:
    """Whether each sample is for testing: every fifth of each class is.

    >>> every_fifth(np.array([0, 0, 0, 1, 0, 0]))
    [False, False, False, False, False, True]
    """
    seen: dict[int, int] = {}
    tested = []
    for label in labels.tolist():
        seen[label] = seen.get(label, 0) + 1
        tested.append(seen[label] % TEST_EVERY == 0)
    return tested


def load_source(
    name: str,
    *,
    data: Path | None = None,
    download: bool = False,
    progress: bool = True,
    side: int | None = None,
    texts: "TextInput | None" = None,
) -> Source:
    """Load a data set: `digits`, `mnist`, `cifar100`, `mini-imagenet`, or the path of a folder.

    A named one is in the folder of its name in `data`, or else in `RANKUP_DATA`; `download` fetches
    a missing one from the Hugging Face Hub. A folder holds Hub-layout parquet files or a folder of
    images per class. Images are decoded once and kept in the cache. With `side` those of a folder
    become RGB and are scaled to that many pixels each way; without it all must have one size. A
    folder of texts, or a CSV file of them, needs `texts`, which says how they become token ids.
    """
    if side is not None and (isinstance(side, bool) or not isinstance(side, int) or side < 1):
        raise DataError(f"side must be a whole number of at least 1, got {side!r}")
    if name == "digits":
        if texts is not None:
            raise DataError("digits are images, but the network takes texts")
        return digits()
    # Here, because the digits need none of it.
    from rankup.data import cache, folders, hub, parquet
    from rankup.data import texts as text_files

    if texts is not None and name in hub.NAMED:
        raise DataError(f"{name} holds images, but the network takes texts")
    named = hub.NAMED.get(name)
    folder = _named_folder(name, data, download) if named else own_folder(name, data)
    found = None if named or not folder.exists() else text_files.find(folder)
    if found is not None:
        if texts is None:
            raise DataError(
                f"{folder} holds texts, which need a tokenizer: name a network that has one with "
                "--net hf:NAME, or give inputs=TextInput(…)"
            )
        if side is not None:
            raise DataError(f"{folder} holds texts, which cannot be scaled to {side} pixels")
        return text_files.text_source(found, texts)
    if not folder.is_dir():
        raise DataError(
            f"there is no data set {name!r}: expected digits, {', '.join(hub.NAMED)} or the path "
            f"of a folder, and {folder.absolute()} is not one"
        )
    tests = named.tests if named else parquet.TESTS
    try:
        layout = parquet.find(folder, tests) or folders.find(folder)
        if layout is None:
            raise DataError(
                f"{folder} holds no data: expected parquet files named train-*.parquet and "
                "test-*.parquet, or a folder of images per class"
            )
        if texts is not None:
            raise DataError(f"{folder} holds images, but the network takes texts")
        arrays = cache.load_decoded(layout, side=named.side if named else side, progress=progress)
    except OSError as error:
        which = error.filename or folder
        raise DataError(f"{which} cannot be read: {error.strerror or error}") from error
    return Source(
        name if named else folder.resolve().name,
        Split(arrays.train_x, arrays.train_y),
        Split(arrays.test_x, arrays.test_y),
        arrays.classes,
    )


def own_folder(name: str, data: Path | str | None) -> Path:
    """The folder of the user's own data set: the path as given, or one inside the folder of data
    sets. It need not exist."""
    path, root = Path(os.path.expanduser(name)), data or os.environ.get("RANKUP_DATA")
    if not path.exists() and root and (inside := Path(os.path.expanduser(root)) / name).exists():
        return inside
    return path


def _named_folder(name: str, data: Path | None, download: bool) -> Path:
    from rankup.data import cache, hub

    downloaded = cache.cache_folder() / "hub" / name
    root = data or os.environ.get("RANKUP_DATA")
    places = [Path(os.path.expanduser(root)) / name] if root else []
    # If `data` is given, another copy is not wanted.
    if not data or download:
        places.append(downloaded)
    for place in places:
        if place.is_dir():
            if place == downloaded:
                hub.check(place)
            return place
    if download:
        return hub.download(name, downloaded)
    raise DataError(
        f"{name} is not in {' or '.join(map(str, places))}: say which folder it is in with "
        "--data PATH or RANKUP_DATA, or get it from the Hugging Face Hub with --download"
    )

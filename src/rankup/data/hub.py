"""Named data sets, and their download from the Hugging Face Hub on request."""

import os
from dataclasses import dataclass
from pathlib import Path

from rankup.data import parquet
from rankup.errors import DataError


@dataclass(frozen=True)
class Named:
    repository: str
    tests: tuple[str, ...]  # the split to test on, the first that exists
    side: int | None = None  # the size that images are scaled to


NAMED = {
    "mnist": Named("ylecun/mnist", ("test", "validation")),
    "cifar100": Named("uoft-cs/cifar100", ("test", "validation")),
    # The Hub has the images in their full sizes; the data set is defined with 84×84.
    "mini-imagenet": Named("timm/mini-imagenet", ("validation", "test"), side=84),
}


def download(name: str, folder: Path) -> Path:
    """Download a data set's parquet files to a folder, unless they are already there."""
    import filelock

    named = NAMED[name]
    # A temporary name until complete, and always the same: an interrupted download goes on.
    temporary = folder.with_name(f".{folder.name}.tmp")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder.with_name(f".{folder.name}.lock")):
            if not folder.exists():
                _fetch(named, temporary)
                os.replace(temporary, folder)
    except OSError as error:
        raise DataError(f"cannot write to {folder.parent}: {error.strerror or error}") from error
    return folder


def _fetch(named: Named, folder: Path) -> None:
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(
            named.repository,
            repo_type="dataset",
            allow_patterns=[f"*{split}-*.parquet" for split in ("train", named.tests[0])],
            local_dir=folder,
        )
    # Which errors a network gives depends on the HTTP library; all mean the same here.
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"{named.repository} could not be downloaded from the Hugging Face Hub: {reason}"
        ) from error
    # Offline, the Hub's client takes an interrupted download for a complete one.
    if parquet.find(folder, named.tests[:1]) is None:
        raise DataError(f"{named.repository} on the Hugging Face Hub holds no parquet files")

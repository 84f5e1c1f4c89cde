"""Named data sets, and their download from the Hugging Face Hub on request.

A download is of one commit. It is compared with the hashes that the Hub has for that commit, and
noted beside its files in downloaded.json, with which they are compared whenever they are loaded.
"""

import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankup.data import parquet
from rankup.errors import DataError
from rankup.utils.files import hash_regular, read_regular
from rankup.utils.hub import in_one_sentence
from rankup.utils.seal import seal

RECORD = "downloaded.json"

_MOST_RECORD = 16 << 20  # bytes; a file takes about 200


@dataclass(frozen=True)
class Named:
    """A data set that can be downloaded by its name."""

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


def check(folder: Path) -> None:
    """Refuse a downloaded data set whose files are not as they were downloaded."""
    again = f"delete {folder} and get it again with --download"
    if not os.path.lexists(folder / RECORD):
        warnings.warn(
            f"{folder} was downloaded by a version that kept no hashes, so its files cannot be "
            f"checked: to have them checked, {again}",
            stacklevel=4,
        )
        return
    try:
        record = json.loads(read_regular(folder / RECORD, _MOST_RECORD))
        intact = record.pop("sha256") == seal(record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        intact = False
    if not intact:
        raise DataError(f"{folder / RECORD}, which has the hashes of the files, is broken: {again}")
    found = _parquet_files(folder)
    for name in sorted({*found, *record["files"]}):
        if name not in found:
            raise DataError(f"{folder / name} is missing: {again}")
        if name not in record["files"]:
            raise DataError(f"{folder / name} was not downloaded with the others: {again}")
        if not _is_as_downloaded(found[name], record["files"][name]):
            raise DataError(f"{folder / name} is not as it was downloaded: {again}")


def _is_as_downloaded(file: Path, noted: dict[str, Any]) -> bool:
    try:
        # Files of several GB are not hashed every time: no program can set ctime back.
        return bool(noted["state"] == _state(file) or noted["sha256"] == hash_regular(file))
    except OSError:  # it became a pipe, or cannot be read
        return False


def _fetch(named: Named, folder: Path) -> None:
    from huggingface_hub import dataset_info, snapshot_download

    failed = f"{named.repository} could not be downloaded from the Hugging Face Hub"
    with in_one_sentence(failed, DataError):
        commit = dataset_info(named.repository, files_metadata=True)
        snapshot_download(
            named.repository,
            repo_type="dataset",
            revision=commit.sha,  # the branch may move on meanwhile
            allow_patterns=[f"*{split}-*.parquet" for split in ("train", named.tests[0])],
            local_dir=folder,
        )
    listed = {file.rfilename: file.lfs for file in commit.siblings or ()}
    files = {}
    for name, path in _parquet_files(folder).items():
        if name not in listed:  # left by an interrupted download of another commit
            path.unlink()
            continue
        sha256, stored = hash_regular(path), listed[name]
        # The Hub has this hash of large files only, which parquet files usually are.
        if stored is not None and stored.sha256 != sha256:
            path.unlink()  # so that it is fetched anew
            raise DataError(
                f"{failed}: {name} arrived with the SHA-256 {sha256}, expected {stored.sha256}; "
                "try again"
            )
        files[name] = {"sha256": sha256, "state": _state(path)}
    # Offline, the Hub's client takes an interrupted download for a complete one.
    if parquet.find(folder, named.tests[:1]) is None:
        raise DataError(f"{named.repository} on the Hugging Face Hub holds no parquet files")
    record = {"repository": named.repository, "revision": commit.sha, "files": files}
    (folder / RECORD).write_text(json.dumps({**record, "sha256": seal(record)}, indent=1))


def _parquet_files(folder: Path) -> dict[str, Path]:
    return {file.relative_to(folder).as_posix(): file for file in folder.rglob("*.parquet")}


def _state(file: Path) -> list[Any]:
    """The size and times of a file, which change whenever it is written."""
    about = file.stat()
    return [about.st_size, about.st_mtime_ns, about.st_ctime_ns]

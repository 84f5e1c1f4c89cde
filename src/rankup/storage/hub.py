"""Networks on the Hugging Face Hub: repositories that hold what a network's folder holds.

Only the manifest, the notes and the files that the manifest names are ever fetched, and each is
compared with its hash. Nothing is unpickled or executed.
"""

import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rankup.errors import StoreError
from rankup.storage import notes
from rankup.storage.atomic import sync, write_file
from rankup.storage.lock import locked
from rankup.storage.manifest import BASE, MANIFEST, File, Manifest, is_of_network
from rankup.storage.saving import files_of, is_as_written, remove_unnamed
from rankup.utils.files import hash_regular, read_regular
from rankup.utils.hub import SCHEME, Address, in_one_sentence


@dataclass(frozen=True)
class Snapshot(os.PathLike[str]):
    """A network in the Hub's cache, at one commit. As a path it is a folder in which manifest and
    notes lie; other files are there once they were fetched."""

    address: Address
    folder: Path

    @classmethod
    def of(cls, path: str) -> "Snapshot":
        """Fetch the manifest and the notes of `hf://user/name@revision`."""
        address = Address.parse(path)
        with in_one_sentence(f"{path} cannot be loaded", StoreError):
            folder = _cached(address, MANIFEST).parent
            # The cache has a folder for each commit: whatever the branch does now, files fit
            # together.
            _cached(Address(address.repository, folder.name), notes.NOTES, may_be_missing=True)
        return cls(address, folder)

    def __fspath__(self) -> str:
        return str(self.folder)

    def __str__(self) -> str:
        return f"{SCHEME}{self.address}"

    def fetch(self, files: Sequence[str], manifest: Manifest) -> None:
        """Fetch files of the same commit, and the base unless that lies elsewhere."""
        address = Address(self.address.repository, self.folder.name)
        has_base = manifest.base is not None and not (manifest.base_from or "").startswith(SCHEME)
        with in_one_sentence(f"{self} cannot be loaded", StoreError):
            sums = [manifest.sums.file] if manifest.sums is not None else []
            for name in [*files, *sums, *([BASE] if has_base else [])]:
                _cached(address, name)


def _cached(address: Address, name: str, may_be_missing: bool = False) -> Path:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError

    try:
        api = HfApi(library_name="rankup")
        return Path(api.hf_hub_download(address.repository, name, revision=address.revision))
    except EntryNotFoundError:
        if not may_be_missing:
            raise
        return Path()


@dataclass(frozen=True)
class Repository:
    """What a repository holds at one commit.

    Attributes:
        files: by path, as the Hub describes them: `size`, `blob_id`, and `lfs.sha256` of those
            that it stores as large files.
    """

    address: Address
    commit: str
    is_private: bool
    files: dict[str, Any]

    @classmethod
    def read(cls, address: Address) -> "Repository":
        from huggingface_hub import HfApi

        with in_one_sentence(f"{address} on the Hugging Face Hub cannot be read", StoreError):
            info = HfApi(library_name="rankup").model_info(
                address.repository, revision=address.revision, files_metadata=True
            )
            files = {file.rfilename: file for file in info.siblings or ()}
            return cls(address, str(info.sha), bool(info.private), files)

    @classmethod
    def find(cls, address: Address) -> "Repository | None":
        """The same, or None if there is none that the user may read."""
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        try:
            return cls.read(address)
        except StoreError as error:
            cause = error.__cause__
            if isinstance(cause, RepositoryNotFoundError) and not isinstance(cause, GatedRepoError):
                return None
            raise

    @cached_property
    def manifest_file(self) -> Path:
        """A copy of its manifest in the Hub's cache."""
        return self._cached(MANIFEST)

    @cached_property
    def manifest(self) -> Manifest | None:
        """The manifest of the network that it holds, if it holds one."""
        return Manifest.read(self.manifest_file.parent) if MANIFEST in self.files else None

    def text(self, name: str) -> str:
        """One of its files, as far as it is text."""
        return read_regular(self._cached(name)).decode(errors="replace")

    def _cached(self, name: str) -> Path:
        with in_one_sentence(f"{self.address} on the Hugging Face Hub cannot be read", StoreError):
            return _cached(Address(self.address.repository, self.commit), name)

    def has(self, name: str, file: File, content: bytes | None = None) -> bool:
        """Whether it holds just this file under a name, as far as its hashes tell.

        Args:
            content: the file's, for what is stored as a small file; without it that is not known.
        """
        there = self.files.get(name)
        if there is None or there.size != file.size:
            return False
        if there.lfs is not None:
            return bool(there.lfs.sha256 == file.sha256)
        return content is not None and there.blob_id == git_hash(content)


def git_hash(content: bytes) -> str:
    """The name that git has for a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass(frozen=True)
class Pull:
    """What a folder lacks to be like a repository."""

    repository: Repository
    folder: Path
    old: Manifest | None
    new: Manifest

    @cached_property
    def fetched(self) -> list[File]:
        """The files that the folder lacks, or that are damaged there."""
        # A base that lies elsewhere on the Hub is not in the repository.
        named = (file for file in files_of(self.new) if file.file in self.repository.files)
        old = files_of(self.old) if self.old else ()
        whole = {file for file in old if is_as_written(self.folder / file.file, file)}
        return [file for file in named if file not in whole]

    @property
    def removed(self) -> list[str]:
        """The tasks that the folder loses."""
        return tasks_lost(self.old, self.new)

    def carry_out(self) -> None:
        """Fetch what is missing, then replace the manifest: whatever happens before that, the
        folder holds the network that it held."""
        # Always the same: a large file whose transfer was cut short goes on where it was.
        scratch = self.folder.with_name(f".{self.folder.name}.pull")
        for file in self.fetched:
            self._fetch(scratch, file)
        has_notes = notes.NOTES in self.repository.files
        if has_notes:
            self._download(scratch, notes.NOTES)
        with locked(self.folder):
            now = Manifest.read(self.folder) if is_of_network(self.folder) else None
            if now != self.old:
                raise StoreError(f"{self.folder} was changed meanwhile: run the command again")
            (self.folder / "tasks").mkdir(exist_ok=True)
            for file in self.fetched:
                os.replace(scratch / file.file, self.folder / file.file)
            sync(self.folder / "tasks")
            write_file(self.folder / MANIFEST, read_regular(self.repository.manifest_file))
            said = notes.read(scratch) if has_notes else {}
            notes.update(self.folder, said, [task.name for task, _ in self.new.tasks])
            remove_unnamed(self.folder, self.old, self.new)
        shutil.rmtree(scratch, ignore_errors=True)

    def _fetch(self, scratch: Path, file: File) -> None:
        """Fetch one file and compare its hash."""
        size = self.repository.files[file.file].size
        address = self.repository.address
        if size != file.size:
            raise StoreError(
                f"{address} is damaged: {file.file} has {size:,} bytes there, but its manifest "
                f"says {file.size:,}"
            )
        path = self._download(scratch, file.file)
        if (found := hash_regular(path)) != file.sha256:
            path.unlink()  # so that it is fetched anew
            raise StoreError(
                f"{address} is damaged: {file.file} arrived with the SHA-256 {found}, but its "
                f"manifest says {file.sha256}"
            )
        with open(path, "rb+") as opened:
            os.fsync(opened.fileno())

    def _download(self, scratch: Path, name: str) -> Path:
        from huggingface_hub import HfApi

        repository = self.repository
        with in_one_sentence(f"{repository.address} cannot be pulled", StoreError):
            fetched = HfApi(library_name="rankup").hf_hub_download(
                repository.address.repository, name, revision=repository.commit, local_dir=scratch
            )
            return Path(fetched)


def plan_pull(address: Address, folder: Path) -> Pull:
    """Compare a folder, which need not exist, with a repository; nothing is changed."""
    folder = Path(os.path.abspath(folder))
    repository = Repository.read(address)
    if (new := repository.manifest) is None:
        raise StoreError(
            f"{address} on the Hugging Face Hub holds no network: it has no {MANIFEST}"
        )
    old = Manifest.read(folder) if is_of_network(folder) else None
    if old is not None and not old.is_of_same_network(new):
        raise StoreError(f"{folder} holds another network: pull this one to a folder of its own")
    for file in files_of(new):
        if file.file not in repository.files and not (file.file == BASE and new.base_from):
            raise StoreError(
                f"{address} is damaged: its manifest names {file.file}, which it lacks"
            )
    return Pull(repository, folder, old, new)


def tasks_lost(old: Manifest | None, new: Manifest) -> list[str]:
    """The tasks that go, or become other ones, where one manifest takes the place of another."""
    kept = {(task.name, file.sha256) for task, file in new.tasks}
    tasks = old.tasks if old else ()
    return [task.name for task, file in tasks if (task.name, file.sha256) not in kept]

"""Networks on the Hugging Face Hub: repositories with the same files as a network's folder.

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
    """A network in the Hub's cache, at one commit. As a path, it is a folder with the manifest and
    the notes; other files are there once they were fetched.

    Attributes:
        address: as it was given, possibly without a commit.
        folder: of the commit, in the Hub's cache.
    """

    address: Address
    folder: Path

    @classmethod
    def of(cls, path: str) -> "Snapshot":
        """Fetch the manifest and the notes of `hf://user/name@revision`."""
        address = Address.parse(path)
        with in_one_sentence(f"{path} cannot be loaded", StoreError):
            folder = _cached(address, MANIFEST).parent
            # The folder is named after its commit. Notes are taken from the same one, even if the
            # branch has moved on.
            _cached(Address(address.repository, folder.name), notes.NOTES, may_be_missing=True)
        return cls(address, folder)

    def __fspath__(self) -> str:
        return str(self.folder)

    def __str__(self) -> str:
        return f"{SCHEME}{self.address}"

    def fetch(self, files: Sequence[str], manifest: Manifest) -> None:
        """Fetch files of the same commit, the router's sums, and the base unless it is in another
        repository."""
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
    """The files of a repository at one commit.

    Attributes:
        address: as it was given.
        commit: that `files` are of.
        is_private: whether only some users may read it.
        files: by path, as the Hub describes them: `size`, `blob_id`, and for those that it stores
            as large files `lfs.sha256`.
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
        """Like `read`, but None if there is no such repository that the user may read."""
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
        """The manifest of its network; None if it has no network."""
        return Manifest.read(self.manifest_file.parent) if MANIFEST in self.files else None

    def text(self, name: str) -> str:
        """One of its files as text; bytes that are none are replaced."""
        return read_regular(self._cached(name)).decode(errors="replace")

    def _cached(self, name: str) -> Path:
        with in_one_sentence(f"{self.address} on the Hugging Face Hub cannot be read", StoreError):
            return _cached(Address(self.address.repository, self.commit), name)

    def has(self, name: str, file: File, content: bytes | None = None) -> bool:
        """Whether a file of that name has this size and hash.

        Args:
            content: of the file, from which the hash of small files is computed. Without it, small
                files count as different.
        """
        listed = self.files.get(name)
        if listed is None or listed.size != file.size:
            return False
        if listed.lfs is not None:
            return bool(listed.lfs.sha256 == file.sha256)
        return content is not None and listed.blob_id == git_hash(content)


def git_hash(content: bytes) -> str:
    """The id of a git blob with this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass(frozen=True)
class Pull:
    """The changes that make a folder's network equal to a repository's.

    Attributes:
        repository: that is pulled.
        folder: that is changed, or made.
        old: the folder's manifest; None if it has no network yet.
        new: the repository's manifest.
    """

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
        """Fetch missing files, then replace the manifest. Until then the folder's network stays as
        it is, whatever happens."""
        # Always the same name, so that an interrupted download is continued.
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
            given = notes.read(scratch) if has_notes else {}
            notes.update(self.folder, given, [task.name for task, _ in self.new.tasks])
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
    """Compare a folder, which need not exist, with a repository. Nothing is changed yet."""
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
    """The tasks of one manifest that are missing in another, or are different there."""
    kept = {(task.name, file.sha256) for task, file in new.tasks}
    tasks = old.tasks if old else ()
    return [task.name for task, file in tasks if (task.name, file.sha256) not in kept]

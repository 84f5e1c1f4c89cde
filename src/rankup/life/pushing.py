"""Putting a network on the Hugging Face Hub, so that others can pull or load it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rankup.data.inputs import TextInput
from rankup.errors import RankupError, StoreError
from rankup.life.card import CARD, MARK, card
from rankup.storage import notes
from rankup.storage.hub import Repository, tasks_lost
from rankup.storage.manifest import BASE, MANIFEST, File, Manifest
from rankup.storage.reading import base_path
from rankup.storage.saving import files_of
from rankup.utils.files import hash_regular, read_regular
from rankup.utils.hub import SCHEME, Address, in_one_sentence

# What a repository may hold in which there is no network yet.
_HARMLESS = frozenset({".gitattributes", ".gitignore", CARD, "LICENSE", "LICENSE.md"})


@dataclass(frozen=True)
class Push:
    """What a repository lacks to hold what a folder does.

    Attributes:
        there: what the repository holds; None if it is to be made.
        small: the content of the files that are not the network's tensors.
    """

    address: Address
    folder: Path
    manifest: Manifest
    there: Repository | None
    small: dict[str, bytes]

    @cached_property
    def uploads(self) -> dict[str, int]:
        """The files that the repository lacks, with their sizes."""
        large = {file.file: file.size for file in self._tensors() if not self._has(file)}
        small = {
            name: len(content)
            for name, content in self.small.items()
            if not self._has(File.of(name, content), content)
        }
        return large | small

    @property
    def deletes(self) -> list[str]:
        """The files in the repository that its network no longer names."""
        named = {file.file for file in self._tensors()}
        gone = (file.file for file in (files_of(self._old) if self._old else ()))
        return sorted(name for name in gone if name not in named and self._is_there(name))

    @property
    def removed(self) -> list[str]:
        """The tasks that the repository loses."""
        return tasks_lost(self._old, self.manifest)

    @property
    def _old(self) -> Manifest | None:
        return self.there.manifest if self.there else None

    def _is_there(self, name: str) -> bool:
        return self.there is not None and name in self.there.files

    def _tensors(self) -> Iterator[File]:
        # A base that lies on the Hub already is loaded from there.
        elsewhere = (self.manifest.base_from or "").startswith(SCHEME)
        return (file for file in files_of(self.manifest) if not (file.file == BASE and elsewhere))

    def _has(self, file: File, content: bytes | None = None) -> bool:
        return self.there is not None and self.there.has(file.file, file, content)

    def carry_out(self, private: bool = False) -> str:
        """Change the repository in one commit, so that nobody ever finds a manifest without its
        files, and return the commit's address."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        sources = {name: self._source(name) for name in self.uploads}
        api = HfApi(library_name="rankup")
        name = self.address.repository
        with in_one_sentence(f"{name} cannot be pushed to", StoreError):
            if self.there is None:
                api.create_repo(name, private=private)
            parent = self.there.commit if self.there else str(api.model_info(name).sha)
            added = [CommitOperationAdd(path, source) for path, source in sources.items()]
            # Where somebody else has pushed since the repository was read, the Hub refuses.
            commit = api.create_commit(
                name,
                [*added, *map(CommitOperationDelete, self.deletes)],
                commit_message=self._message(),
                parent_commit=parent,
            )
        return str(commit.oid)

    def _source(self, name: str) -> bytes | str:
        """What to upload: the content, or a large file whose hash was compared."""
        if name in self.small:
            return self.small[name]
        path = self.folder / name
        if name == BASE:
            path = base_path(self.folder, self.manifest.base_from)
        (file,) = (file for file in files_of(self.manifest) if file.file == name)
        try:
            found = hash_regular(path)
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from error
        if found != file.sha256:
            raise StoreError(f"{path} is not the file that was saved: its SHA-256 has changed")
        return str(path)

    def _message(self) -> str:
        old = {task.name for task, _ in self._old.tasks} if self._old else set()
        new = [task.name for task, _ in self.manifest.tasks if task.name not in old]
        said = [f"add {', '.join(new)}"] if new else []
        said += [f"remove {', '.join(self.removed)}"] if self.removed else []
        return ("; ".join(said) or "update what is said of the network")[:200]


def plan_push(folder: Path, repository: str) -> Push:
    """Compare a repository, which need not exist, with a network's folder; nothing is changed."""
    address = Address.parse(repository)
    if address.revision is not None:
        raise RankupError(f"a push goes to the main branch: leave @{address.revision} out")
    manifest, there = Manifest.read(folder), Repository.find(address)
    if there is not None:
        _refuse_other(there, manifest)
    small = {MANIFEST: read_regular(folder / MANIFEST)}
    if (folder / notes.NOTES).exists():
        small[notes.NOTES] = read_regular(folder / notes.NOTES)
    if there is None or _is_ours(there):
        small[CARD] = card(folder, manifest, address.repository).encode()
    return Push(address, folder, manifest, there, small)


def _refuse_other(there: Repository, manifest: Manifest) -> None:
    name = there.address.repository
    if there.manifest is None:
        if others := sorted(there.files.keys() - _HARMLESS):
            raise StoreError(
                f"{name} holds other files, such as {others[0]}: push to a repository of its own"
            )
    elif not there.manifest.is_of_same_network(manifest):
        raise StoreError(f"{name} holds another network: push this one to a repository of its own")


def _is_ours(there: Repository) -> bool:
    """Whether the repository's card may be written anew: a person's own is left alone."""
    return CARD not in there.files or MARK in there.text(CARD)


def local_tokenizers(manifest: Manifest) -> list[str]:
    """The folders of this machine whose tokenizers a network's texts need."""
    inputs = (manifest.inputs, *(task.about.inputs for task, _ in manifest.tasks))
    names = (each.tokenizer for each in inputs if isinstance(each, TextInput))
    return sorted({name for name in names if Path(name).expanduser().is_dir()})

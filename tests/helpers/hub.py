"""A stand-in for the Hugging Face Hub: commits are folders, and nothing leaves this machine."""

import hashlib
import inspect
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, errors

from rankup.storage.hub import git_hash


class FolderHub:
    """Repositories in a folder, and what `HfApi` does with them.

    Attributes:
        uploaded: the files of each commit that were uploaded for it.
        fetched: the files that were fetched and not in a cache, in their order.
        token: what the user may do; None: not logged in.
    """

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self.token = root, "write"
        self.commits: dict[str, list[str]] = {}
        self.private: dict[str, bool] = {}
        self.uploaded: list[set[str]] = []
        self.fetched: list[str] = []
        self.before_commit: Callable[[], object] = lambda: None
        patch.setattr("huggingface_hub.HfApi", lambda **_: self)

    def folder(self, repository: str, revision: str | None = None) -> Path:
        """The files of a commit, by default the last one."""
        commits = self._known(repository)
        commit = commits[-1] if revision in (None, "main") else revision
        if commit not in commits:
            raise failure(errors.RevisionNotFoundError, 404)
        return self.root / repository / commit

    def create_repo(self, *args: Any, **options: Any) -> None:
        asked = as_called(HfApi.create_repo, args, options)
        self._refuse_readers()
        assert asked["repo_id"] not in self.commits
        self.private[asked["repo_id"]] = bool(asked.get("private"))
        self.commits[asked["repo_id"]] = []
        self._commit(asked["repo_id"], {".gitattributes": b"*.safetensors filter=lfs\n"}, [])

    def model_info(self, *args: Any, **options: Any) -> SimpleNamespace:
        asked = as_called(HfApi.model_info, args, options)
        folder = self.folder(asked["repo_id"], asked.get("revision"))
        files = [described(folder, path) for path in folder.rglob("*") if path.is_file()]
        siblings = files if asked.get("files_metadata") else None
        private = self.private[asked["repo_id"]]
        return SimpleNamespace(sha=folder.name, private=private, siblings=siblings)

    def create_commit(self, *args: Any, **options: Any) -> SimpleNamespace:
        asked = as_called(HfApi.create_commit, args, options)
        self._refuse_readers()
        self.before_commit()
        repository, operations = asked["repo_id"], list(asked["operations"])
        if asked["parent_commit"] != self._known(repository)[-1]:
            raise failure(errors.HfHubHTTPError, 412)
        added = {
            each.path_in_repo: content_of(each)
            for each in operations
            if isinstance(each, CommitOperationAdd)
        }
        deleted = [e.path_in_repo for e in operations if isinstance(e, CommitOperationDelete)]
        self.uploaded.append({*added})
        return SimpleNamespace(oid=self._commit(repository, added, deleted))

    def hf_hub_download(self, *args: Any, **options: Any) -> str:
        asked = as_called(HfApi.hf_hub_download, args, options)
        repository, name = asked["repo_id"], asked["filename"]
        source = self.folder(repository, asked.get("revision"))
        if not (source / name).exists():
            raise errors.EntryNotFoundError(f"404: no {name}")
        inside = asked.get("local_dir") or self.root / "cache" / repository / source.name
        target = Path(inside) / name
        if not target.exists():
            self.fetched.append(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target)
        return str(target)

    def _known(self, repository: str) -> list[str]:
        if repository not in self.commits:
            raise failure(errors.RepositoryNotFoundError, 404)
        return self.commits[repository]

    def _refuse_readers(self) -> None:
        if self.token is None:
            raise failure(errors.HfHubHTTPError, 401)
        if self.token == "read":
            raise failure(errors.HfHubHTTPError, 403)

    def _commit(self, repository: str, added: dict[str, bytes], deleted: Iterable[str]) -> str:
        before = self.commits[repository]
        name = hashlib.sha1(f"{repository} {len(before)}".encode()).hexdigest()
        folder = self.root / repository / name
        if before:
            shutil.copytree(self.root / repository / before[-1], folder)
        for path, content in added.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        for path in deleted:
            (folder / path).unlink()
        before.append(name)
        return name


def as_called(function: Callable[..., Any], args: Any, options: Any) -> dict[str, Any]:
    """The arguments by name, which the real client would accept, too."""
    bound = inspect.signature(function).bind(None, *args, **options).arguments
    return {name: value for name, value in bound.items() if name != "self"}


def failure(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    response: Any = SimpleNamespace(status_code=status, headers={}, request=None)
    return kind(f"{status} from the stand-in\nand more lines", response=response)


def described(folder: Path, path: Path) -> SimpleNamespace:
    content, name = path.read_bytes(), path.relative_to(folder).as_posix()
    lfs = SimpleNamespace(sha256=hashlib.sha256(content).hexdigest())
    return SimpleNamespace(
        rfilename=name,
        size=len(content),
        blob_id=git_hash(content),
        lfs=lfs if name.endswith(".safetensors") else None,
    )


def content_of(operation: CommitOperationAdd) -> bytes:
    given = operation.path_or_fileobj
    return given if isinstance(given, bytes) else Path(str(given)).read_bytes()

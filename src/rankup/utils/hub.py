"""The Hugging Face Hub: addresses of repositories, and its client's errors in one sentence."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rankup.errors import RankupError

SCHEME = "hf://"

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


@dataclass(frozen=True)
class Address:
    """A repository, at a branch, tag or commit if one is named.

    >>> Address.parse("hf://user/shop@v2")
    Address(repository='user/shop', revision='v2')
    """

    repository: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Address":
        repository, at, revision = text.removeprefix(SCHEME).partition("@")
        if not _REPOSITORY.fullmatch(repository) or (at and not revision):
            raise RankupError(
                f"a repository on the Hugging Face Hub is written user/name or user/name@revision, "
                f"got {text!r}"
            )
        return cls(repository, revision or None)

    def __str__(self) -> str:
        return self.repository + (f"@{self.revision}" if self.revision else "")


@contextmanager
def in_one_sentence(failed: str, kind: type[RankupError]) -> Iterator[None]:
    """Raise the client's errors as one sentence that begins with what failed.

    Only calls of the client belong inside: which errors a network gives depends on the HTTP
    library, so all are caught.
    """
    try:
        yield
    except RankupError:
        raise
    except Exception as error:
        raise kind(f"{failed}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.LocalEntryNotFoundError):
        return "the Hub cannot be reached, and its cache does not hold what is needed"
    if isinstance(error, errors.RevisionNotFoundError):
        return "it has no such revision"
    if isinstance(error, errors.GatedRepoError):
        return "access to it has to be asked for on its page"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is no such repository, or your token may not read it (see `hf auth login`)"
    if isinstance(error, errors.LocalTokenNotFoundError) or status == 401:
        return "there is no valid token: log in with `hf auth login`, or set HF_TOKEN"
    if status == 403:
        return "your token may not write there"
    if status == 412:
        return "somebody else has pushed meanwhile; run the command again"
    return next(iter(str(error).splitlines()), "") or type(error).__name__

"""Seals: a SHA-256 in a JSON file over everything else in it, which shows whether the file was
edited."""

import reprlib
from collections.abc import Mapping
from os import PathLike
from typing import Any

from rankup.errors import RankupError
from rankup.utils.seal import seal

__all__ = ["FORMAT", "SealError", "opened", "seal", "sealed", "without_seal"]

FORMAT = 2  # of sealed files; those of version 0.1 have neither a format nor a seal
_MARKS = ("format", "sha256")


class SealError(RankupError):
    """A file does not match its seal."""

    def __init__(self, what: object, home: str | PathLike[str]) -> None:
        super().__init__(
            f"{what} does not match its seal: put back the file as it was written, or accept it "
            f"as it is with `rankup seal {home}`"
        )


def sealed(data: Mapping[str, Any]) -> dict[str, Any]:
    """Data with a format number and a seal.

    >>> opened(sealed({"a": 1}), "a.json", "folder")
    ({'a': 1}, True)
    """
    marked = {"format": FORMAT, **data}
    return {**marked, "sha256": seal(marked)}


def opened(
    data: Mapping[str, Any], what: object, home: str | PathLike[str]
) -> tuple[dict[str, Any], bool]:
    """The data without its format and seal, and whether it had them. Raises `SealError` if the seal
    does not match.

    Args:
        what: the file, for errors.
        home: the argument of `rankup seal` that seals it again, for errors.

    >>> opened({"a": 1}, "a.json", "folder")
    ({'a': 1}, False)
    """
    if not any(mark in data for mark in _MARKS):
        return dict(data), False
    marked = {key: value for key, value in data.items() if key != "sha256"}
    if data.get("sha256") != seal(marked) or "format" not in data:
        raise SealError(what, home)
    if data["format"] != FORMAT:
        raise RankupError(
            f"{what} has format {reprlib.repr(data['format'])}, but this rankup reads {FORMAT}: it "
            "was written by a newer rankup"
        )
    return without_seal(data), True


def without_seal(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key not in _MARKS}

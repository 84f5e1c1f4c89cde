"""Errors that rankup raises, and how they and warnings are shown.

Every message is one sentence: what was given and what was expected."""

import warnings


class RankupError(ValueError):
    """Something that was given cannot be used; nothing was changed."""


class TaskStateError(RankupError, RuntimeError):
    """A call came at the wrong moment, such as a commit when no task is being learned."""


class DataError(RankupError):
    """Data is missing or cannot be used; the message says which, and where it lies."""


class StoreError(RankupError):
    """A network folder cannot be read or written; what was whole before still is."""


def plain_warnings() -> None:
    """Show warnings as plain sentences: where in the code they come from is of no use to the user
    of a command. Pillow's about large images does not say which: those that are too large are
    refused by name."""
    warnings.filterwarnings("ignore", message="Image size .* could be decompression bomb")
    warnings.formatwarning = lambda message, *_: f"rankup: {message}\n"


def want_of_memory(error: Exception) -> str | None:
    """The message for an error that means too little memory, None for others. Torch's are known by
    name and text, so that it need not be loaded."""
    if type(error).__name__ == "OutOfMemoryError":
        return "the GPU has too little memory for it; fewer seeds or smaller batches need less"
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return "there is too little memory for it"
    return None

"""The errors that rankup raises, and how warnings are shown.

Every message is one sentence that says what was given and what was expected.
"""

import warnings


class RankupError(ValueError):
    """An argument, option or file cannot be used. Nothing was changed."""


class TaskStateError(RankupError, RuntimeError):
    """A call came at the wrong moment, such as a commit when no task is being learned."""


class DataError(RankupError):
    """Data are missing or cannot be used; the message says which, and where they are."""


class StoreError(RankupError):
    """A network folder cannot be read or written. What was saved there before is still whole."""


def plain_warnings() -> None:
    """Show warnings as plain sentences, without the line of code that they come from, for users of
    commands. Pillow's warning about large images is left out, because it does not name the image;
    images that are too large are refused by name."""
    warnings.filterwarnings("ignore", message="Image size .* could be decompression bomb")
    warnings.formatwarning = lambda message, *_: f"rankup: {message}\n"


def want_of_memory(error: Exception) -> str | None:
    """A message for errors that mean too little memory, None for others. Torch's are recognised by
    name and text, so that torch need not be imported."""
    if type(error).__name__ == "OutOfMemoryError":
        return "the GPU has too little memory for it; fewer seeds or smaller batches need less"
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return "there is too little memory for it"
    return None

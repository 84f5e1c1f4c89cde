"""What rankup raises. Every message is one sentence: what was given and what was expected."""

import warnings


class RankupError(ValueError):
    """Something that was given cannot be used; nothing was changed."""


class TaskStateError(RankupError, RuntimeError):
    """A call came at the wrong moment, such as a commit when no task is being learned."""


class StoreError(RankupError):
    """A network folder cannot be read or written; what was whole before still is."""


def plain_warnings() -> None:
    """Show warnings as sentences for the user of a command: where in the code they come from is of
    no use there."""
    warnings.formatwarning = lambda message, *_: f"rankup: {message}\n"

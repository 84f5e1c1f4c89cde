"""What rankup raises. Every message is one sentence: what was given and what was expected."""


class RankupError(ValueError):
    """Something that was given cannot be used; nothing was changed."""


class TaskStateError(RankupError, RuntimeError):
    """A call came at the wrong moment, such as a commit when no task is being learned."""


class StoreError(RankupError):
    """A network folder cannot be read or written; what was whole before still is."""

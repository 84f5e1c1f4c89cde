"""What goes wrong with data."""

from rankup.errors import RankupError


class DataError(RankupError):
    """Data is missing or cannot be used; the message says which, and where it lies."""

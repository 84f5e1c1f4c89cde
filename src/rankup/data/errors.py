"""The error of data that is missing or cannot be used."""

from rankup.errors import RankupError


class DataError(RankupError):
    """Data is missing or cannot be used; the message says which, and where it lies."""

"""The limits of a server, and the error of requests that exceed them."""

from dataclasses import dataclass

from rankup.errors import RankupError


class Refused(RankupError):
    """A request that is answered with an error: one sentence and an HTTP status."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """The most that a server accepts."""

    body: int = 16 << 20  # bytes of a request
    zip: int = 512 << 20  # bytes of a request that brings a zip to learn from
    bodies: int = 1 << 30  # bytes of all requests that are being read
    pixels: int = 1 << 25  # of an image
    items: int = 256  # pairs of an input and a task in a request
    queue: int = 1024  # inputs that wait to be answered
    patience: float = 20.0  # seconds in which a request's headers must have come, then its body

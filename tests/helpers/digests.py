"""A checksum of all that a stream holds."""

import hashlib

from rankup.data import Stream
from rankup.data.transforms import to_float


def digest(stream: Stream) -> str:
    """A hash of all of a stream's tasks: names, classes, data, transforms."""
    hashed = hashlib.sha256()
    for task in stream:
        hashed.update(repr((task.name, task.classes)).encode())
        for x, y in ((task.train_x, task.train_y), (task.test_x, task.test_y)):
            pixels = to_float(x)
            shown = task.transform(pixels) if task.transform else pixels
            hashed.update(shown.numpy().tobytes() + y.numpy().tobytes())
    return hashed.hexdigest()

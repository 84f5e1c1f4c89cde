"""A folder of images of one's own."""

from pathlib import Path

import pytest

from helpers.pictures import encoded, pictures


def own_images(root: Path, *classes: str) -> Path:
    """Four classes that a network tells apart."""
    for number, name in enumerate(classes or "abcd"):
        try:
            (root / name).mkdir(parents=True)
        except OSError:
            pytest.skip("the file system has names of text alone")
        for index, image in enumerate(pictures(12, 6, 6, seed=number)):
            (root / name / f"{index}.png").write_bytes(encoded(image // 4 + 48 * number))
    return root

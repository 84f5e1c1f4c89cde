"""Folder of images of one's own."""

from pathlib import Path

from helpers.pictures import encoded, pictures


def own_images(root: Path, *classes: str) -> Path:
    """Write four classes, or those named, that a network tells apart."""
    for number, name in enumerate(classes or "abcd"):
        (root / name).mkdir(parents=True)
        for index, image in enumerate(pictures(12, 6, 6, seed=number)):
            (root / name / f"{index}.png").write_bytes(encoded(image // 4 + 48 * number))
    return root

"""Photos become the pixels that a viewer shows, or are refused in one sentence."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pictures import encoded
from rankup.data import DataError, load_source

# From black to white, and where 8 bits that are cut off, not scaled, leave no difference.
DEEP = np.array([[0, 255, 256], [12850, 25700, 38550], [51400, 65278, 65535]])
SCALED = [[0, 1, 1], [50, 100, 150], [200, 254, 255]]


def folder_of(root: Path, name: str, content: bytes) -> str:
    """Two classes of five, all of them the same image."""
    for place in ("ant", "bee"):
        (root / place).mkdir(parents=True)
        for number in range(5):
            (root / place / f"{number}.{name}").write_bytes(content)
    return str(root)


def pgm(pixels: "np.ndarray[Any, Any]") -> bytes:
    return b"P5 %d %d 65535\n" % pixels.shape[::-1] + pixels.astype(">u2").tobytes()


def tiff(pixels: "np.ndarray[Any, Any]", kind: str) -> bytes:
    numbers = {"I;16": "<u2", "I;16B": ">u2", "I": "<i4", "F": "<f4"}[kind]
    image = Image.frombytes(kind, pixels.shape[::-1], pixels.astype(numbers).tobytes())
    buffer = io.BytesIO()
    image.save(buffer, "TIFF")
    return buffer.getvalue()


SIXTEEN_BITS = {
    "png": encoded(DEEP.astype(np.uint16)),
    "pgm": pgm(DEEP),
    "little.tif": tiff(DEEP, "I;16"),
    "big.tif": tiff(DEEP, "I;16B"),
}


@pytest.mark.parametrize("name", SIXTEEN_BITS)
def test_grey_of_16_bits_is_scaled_to_8_where_a_size_is_asked_for(
    name: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "scans", name, SIXTEEN_BITS[name])
    assert load_source(folder, side=3).train.x[0].tolist() == [SCALED] * 3
    with pytest.raises(DataError, match="of the kind I;16, expected grey .*: split:PATH@64 as the"):
        load_source(folder)


@pytest.mark.parametrize("side", [None, 3])
@pytest.mark.parametrize("kind", ["I", "F"])
def test_numbers_whose_white_is_not_known_are_refused(
    kind: str, side: int | None, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "heights", "tif", tiff(DEEP, kind))
    with pytest.raises(DataError) as caught:
        load_source(folder, side=side)
    assert str(caught.value) == (
        f"{Path(folder, 'ant', '0.tif')}: the image is of the kind {kind}, whose white is not "
        "known, expected grey or RGB with 8 bits per channel, or grey with 16"
    )

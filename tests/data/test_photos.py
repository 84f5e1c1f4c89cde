"""Photos become the pixels that a viewer shows, or are refused in one sentence."""

import io
import struct
import warnings
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from helpers.pictures import encoded, pictures
from rankup.data import DataError
from rankup.data.decode import pixels_of
from rankup.errors import plain_warnings

# From black to white, including values that truncating to 8 bits instead of scaling would merge.
DEEP = np.array([[0, 255, 256], [12850, 25700, 38550], [51400, 65278, 65535]])
SCALED = [[0, 1, 1], [50, 100, 150], [200, 254, 255]]


def shown(content: bytes, side: int | None = None) -> "np.ndarray[Any, Any]":
    """`[H, W, C]` of a decoded image."""
    return pixels_of(content, "photo", side).transpose(1, 2, 0)


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
def test_16_bit_grey_is_scaled_where_a_size_is_asked_for(name: str) -> None:
    content = SIXTEEN_BITS[name]
    assert pixels_of(content, name, side=3).tolist() == [SCALED] * 3
    with pytest.raises(DataError, match="of kind I;16, expected grey .*: the stream split:PATH@64"):
        pixels_of(content, name, side=None)


@pytest.mark.parametrize("side", [None, 3])
@pytest.mark.parametrize("kind", ["I", "F"])
def test_numbers_whose_white_is_unknown_are_refused(kind: str, side: int | None) -> None:
    with pytest.raises(DataError) as caught:
        pixels_of(tiff(DEEP, kind), "0.tif", side)
    assert str(caught.value) == (
        f"0.tif: the image is of kind {kind}, whose white is unknown, expected grey or RGB with 8 "
        "bits per channel, or grey with 16"
    )


# A photo of 4×3 pixels as stored in its file, and as it was seen, by its EXIF orientation.
STORED = pictures(1, 3, 4, 3)[0]
SEEN = {
    1: STORED,
    2: STORED[:, ::-1],
    3: STORED[::-1, ::-1],
    4: STORED[::-1],
    5: STORED.transpose(1, 0, 2),
    6: STORED[::-1].transpose(1, 0, 2),
    7: STORED[::-1, ::-1].transpose(1, 0, 2),
    8: STORED[:, ::-1].transpose(1, 0, 2),
}


def held(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


@pytest.mark.parametrize("orientation", SEEN)
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_photos_are_upright(kind: str, orientation: int) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    content = encoded(STORED, kind, exif=held(orientation), **options)
    np.testing.assert_array_equal(shown(content), SEEN[orientation])
    scaled = Image.fromarray(np.ascontiguousarray(SEEN[orientation])).resize((5, 5), Image.LANCZOS)
    np.testing.assert_array_equal(shown(content, side=5), np.asarray(scaled))


def test_16_bit_grey_is_upright() -> None:
    pixels = shown(encoded(DEEP.astype(np.uint16), exif=held(6)), side=3)
    assert pixels[..., 0].tolist() == np.array(SCALED)[::-1].T.tolist()


def test_odd_exif_data_do_not_hide_the_orientation() -> None:
    entries = [
        struct.pack("<HHIf", ExifTags.Base.ImageWidth, 11, 1, 1.5),
        struct.pack("<HHIHH", ExifTags.Base.Orientation, 3, 1, 6, 0),
    ]
    exif = b"Exif\0\0II*\0\x08\0\0\0\x02\0" + b"".join(entries) + bytes(4)
    np.testing.assert_array_equal(shown(encoded(STORED, exif=exif)), SEEN[6])


def test_broken_exif_data_are_ignored() -> None:
    content = encoded(STORED, exif=b"Exif\0\0not what a camera writes")
    np.testing.assert_array_equal(shown(content), STORED)


# Three pixels side by side: the second cannot be seen; the third can be half seen, where an image
# has more than one colour for that.
RGB, GREY, SHOWN = bytes([200, 0, 0, 0, 200, 0, 0, 0, 200]), bytes([50, 100, 200]), [255, 0, 128]
RED, WHITE, BLUE, PALE = [200, 0, 0], [255, 255, 255], [0, 0, 200], [127, 127, 227]


def seen_through(kind: str, bands: bytes, **options: object) -> bytes:
    image = Image.frombytes(kind, (3, 1), bands)
    if kind in ("P", "PA"):
        image.putpalette(RGB)
    buffer = io.BytesIO()
    image.save(buffer, "TIFF" if kind == "PA" else "PNG", **options)
    return buffer.getvalue()


def with_alpha(bands: bytes) -> bytes:
    width = len(bands) // 3
    colours = [bands[at : at + width] for at in range(0, len(bands), width)]
    return b"".join(colour + bytes([a]) for colour, a in zip(colours, SHOWN, strict=True))


CHANNELS = {
    "RGBA": (seen_through("RGBA", with_alpha(RGB)), [RED, WHITE, PALE]),
    "LA": (seen_through("LA", with_alpha(GREY)), [[50] * 3, WHITE, [227] * 3]),
    "PA": (seen_through("PA", with_alpha(bytes(range(3)))), [RED, WHITE, PALE]),
}
COLOURS = {
    "P": (seen_through("P", bytes(range(3)), transparency=bytes(SHOWN)), [RED, WHITE, PALE]),
    "P with one": (seen_through("P", bytes(range(3)), transparency=1), [RED, WHITE, BLUE]),
    "RGB": (seen_through("RGB", RGB, transparency=(0, 200, 0)), [RED, WHITE, BLUE]),
    "L": (seen_through("L", GREY, transparency=100), [[50] * 3, WHITE, [200] * 3]),
}


@pytest.mark.parametrize("kind", CHANNELS | COLOURS)
def test_transparent_pixels_are_laid_on_white(kind: str) -> None:
    content, wanted = (CHANNELS | COLOURS)[kind]
    resized = Image.fromarray(np.array([wanted], dtype=np.uint8)).resize((6, 6), Image.LANCZOS)
    np.testing.assert_array_equal(shown(content, side=6), np.asarray(resized))


@pytest.mark.parametrize("kind", COLOURS)
def test_transparent_colours_are_white_without_a_size(kind: str) -> None:
    content, wanted = COLOURS[kind]
    pixels = shown(content)
    assert pixels.shape == (1, 3, 1 if kind == "L" else 3)
    assert np.broadcast_to(pixels, (1, 3, 3)).tolist() == [wanted]


def test_large_image_is_read_and_a_huge_one_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow warns of images beyond its limit and refuses those of twice as many pixels."""
    content = encoded(STORED)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)  # the image has 12
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    with warnings.catch_warnings():
        plain_warnings()  # as the command line shows them
        np.testing.assert_array_equal(shown(content), STORED)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5)
    with pytest.raises(DataError, match="photo: the image is too large to be read safely"):
        shown(content)

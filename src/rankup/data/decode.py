"""Decoder of images to uint8 arrays of one shape, with several threads."""

import io
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from rankup.data.encoded import Encoded, EncodedSplit, Pixels
from rankup.errors import DataError
from rankup.utils.progress import Advance

if TYPE_CHECKING:
    from PIL import Image

Shape = tuple[int, ...]  # channels, height, width

_GROUP = 128  # images that a thread decodes at a time
_SCALE_HINT = "the stream split:PATH@64 converts all images to RGB of 64×64 pixels"
# Of the many kinds that Pillow knows some are decoded by other programs, such as EPS.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


class Decoder:
    """Decodes a data set's images to the shape of its first one.

    With `side` every image is brought to RGB and that many pixels each way; without it an image
    of another shape is an error.
    """

    def __init__(self, encoded: Encoded, side: int | None = None) -> None:
        self.encoded = encoded
        self.side = side
        first = next(encoded.train.images())
        self.shape: Shape = pixels_of(first, encoded.train.where(0), side).shape

    def groups(self, split: EncodedSplit, advance: Advance) -> Iterator[Pixels]:
        """Yield the images of a split in their order, some at a time."""
        threads = min(8, os.cpu_count() or 1)
        images = enumerate(split.images())
        pending: deque[Future[Pixels]] = deque()
        with ThreadPoolExecutor(threads) as pool:
            try:
                while group := list(islice(images, _GROUP)):
                    pending.append(pool.submit(self._group, split, group))
                    # No more than the threads need: decoded images are large.
                    if len(pending) > 2 * threads:
                        yield _next_group(pending, advance)
                while pending:
                    yield _next_group(pending, advance)
            finally:
                pool.shutdown(cancel_futures=True)

    def array(self, split: EncodedSplit, advance: Advance) -> Pixels:
        """All images of a split: `[N, C, H, W]`."""
        array = np.empty((len(split.labels), *self.shape), dtype=np.uint8)
        done = 0
        for group in self.groups(split, advance):
            array[done : done + len(group)] = group
            done += len(group)
        return array

    def _group(self, split: EncodedSplit, group: list[tuple[int, bytes | None]]) -> Pixels:
        decoded = np.empty((len(group), *self.shape), dtype=np.uint8)
        for place, (index, image) in enumerate(group):
            pixels = pixels_of(image, split.where(index), self.side)
            if pixels.shape != self.shape:
                raise DataError(
                    f"{split.where(index)}: the image is {words_for(pixels.shape)}, but the first "
                    f"one ({self.encoded.train.where(0)}) is {words_for(self.shape)}, and all must "
                    f"be alike: {_SCALE_HINT}"
                )
            decoded[place] = pixels
        return decoded


def _next_group(pending: "deque[Future[Pixels]]", advance: Advance) -> Pixels:
    group = pending.popleft().result()
    advance(len(group))
    return group


def pixels_of(image: bytes | None, where: str, side: int | None) -> Pixels:
    """Decode an image to `[C, H, W]`; with `side` to RGB of that many pixels each way."""
    from PIL import Image

    opened = _decoded(image, where)
    kind = _kind(opened)
    wanted = "RGB" if side is not None else {"1": "L", "P": "RGB"}.get(kind, kind)
    if wanted not in ("L", "RGB"):
        raise DataError(
            f"{where}: the image is of kind {kind}, expected grey (L) or RGB with 8 bits per "
            f"channel: {_SCALE_HINT}"
        )
    opened = _shown_as(opened, wanted)
    if side is not None and opened.size != (side, side):
        opened = opened.resize((side, side), Image.Resampling.LANCZOS)
    return as_pixels(opened)


def picture_of(image: bytes | None, where: str, mode: str) -> "Image.Image":
    """Decode an image of any kind to Pillow's mode L or RGB, as viewers show it."""
    return _shown_as(_decoded(image, where), mode)


def as_pixels(image: "Image.Image") -> Pixels:
    """The pixels of an image in mode L or RGB, `[C, H, W]`."""
    array: Pixels = np.asarray(image)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def _decoded(image: bytes | None, where: str) -> "Image.Image":
    """An image as it is stored, if its colours can be told."""
    from PIL import Image

    if image is None:
        raise DataError(f"{where}: there is no image")
    try:
        opened: Image.Image = Image.open(io.BytesIO(image), formats=_FORMATS)
        opened.load()
    except Image.DecompressionBombError as error:
        raise DataError(f"{where}: the image is too large to be read safely: {error}") from error
    # Broken bytes make decoders raise errors of many kinds, from SyntaxError to struct.error.
    except Exception as error:
        raise DataError(f"{where}: the image is broken or in an unknown format") from error
    if (kind := _kind(opened)) in ("I", "F"):
        raise DataError(
            f"{where}: the image is of kind {kind}, whose white is unknown, expected grey or "
            "RGB with 8 bits per channel, or grey with 16"
        )
    return opened


def _shown_as(image: "Image.Image", mode: str) -> "Image.Image":
    """An image upright, on white where it is transparent, and in a mode with 8 bits."""
    wide = _kind(image) == "I;16"
    image = _upright(image)
    image = _on_white(_in_8_bits(image) if wide else image)
    return image if image.mode == mode else image.convert(mode)


def _kind(image: "Image.Image") -> str:
    """Pillow's mode of the image; I;16 for all 16-bit grey, whatever its byte order."""
    # Pillow calls 16 bits I in PGM, and in older releases in PNG: neither can hold more.
    wide = image.mode == "I" and image.format in ("PNG", "PPM")
    return "I;16" if wide or image.mode.startswith("I;16") else image.mode


def _upright(image: "Image.Image") -> "Image.Image":
    """Turn and mirror an image as its EXIF data say; leave it if they cannot be read."""
    from PIL import ExifTags, Image

    if image.format == "TIFF":  # Pillow has turned it already, and older releases do not say so
        return image
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # of many kinds, as with broken images, but viewers show such images
        return image
    if orientation == 1:
        return image
    # ImageOps.exif_transpose also rewrites all EXIF data, and fails if some are odd.
    turn = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }.get(orientation)
    return image if turn is None else image.transpose(turn)


def _on_white(image: "Image.Image") -> "Image.Image":
    """Composite a transparent image on white: otherwise invisible colours would show."""
    from PIL import Image

    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return image
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA"))


def _in_8_bits(image: "Image.Image") -> "Image.Image":
    """Scale 16-bit grey to 8 bits: Pillow's own conversion turns all from 255 on white."""
    from PIL import Image

    scaled = (np.asarray(image).astype(np.uint32) + 128) // 257  # to the nearest, 65535 to 255
    return Image.fromarray(scaled.astype(np.uint8))


def words_for(shape: tuple[int, ...]) -> str:
    """
    >>> words_for((1, 5, 4))
    '4×5 grey'
    """
    channels, height, width = shape
    return f"{width}×{height} {'grey' if channels == 1 else 'RGB'}"

"""Inputs: descriptions of how raw data, such as photos or sentences, becomes a network's batches.

They are stored with a network as plain data, by `to_json` and `from_json`. The latter checks every
entry, since a network may come from a stranger.
"""

import hashlib
import math
import os
import re
import reprlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, get_args

import numpy as np
import torch
from torch import Tensor

from rankup.data.decode import as_pixels, picture_of
from rankup.data.encoded import MOST_ENCODED, Pixels, read_image
from rankup.data.transforms import Scaling, to_float
from rankup.errors import DataError
from rankup.utils.files import read_regular
from rankup.utils.hub import in_one_sentence

if TYPE_CHECKING:
    from PIL import Image

Interpolation = Literal["lanczos", "bilinear", "bicubic"]
CropMode = Literal["squash", "center"]
Kind = Literal["float32", "int64"]

_LARGEST_SIDE = 4096  # pixels each way
_MOST_PIXELS = 1 << 28  # of a scaled image before it is cropped, which may be long and thin
_LONGEST_TEXT = 1 << 20  # characters: a tokenizer reads all of them before it cuts
_MOST_TOKENS = 1 << 16
_MOST_NUMBERS = 1 << 30
_MOST_TOKENIZER = 256 << 20  # bytes of a tokenizer.json; the largest vocabularies have 40 MB
_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class ImageInput:
    """Encoded images (bytes, or paths of files) as floats `[N, channels, size, size]`.

    An image is scaled to `size / crop` pixels and cropped to the `size` pixels in the middle. Its
    pixels become floats, 0 for black and 1 for white, of which `mean` is subtracted and which are
    then divided by `std`. By default images are only scaled, as by the streams `split:PATH@SIZE`.

    Args:
        size: pixels each way.
        channels: 3 for colours, 1 for grey.
        crop: share of the scaled image's side that is kept, timm's `crop_pct`.
        crop_mode: "squash" scales both sides to the same length; "center" scales the shorter one
            to that length, keeps the ratio and crops the longer one.
        mean: one number for all channels, or one for each.
        std: likewise.
        interpolation: the filter that images are scaled with.

    >>> ImageInput(224, crop=0.875, crop_mode="center").to_json()["crop"]
    0.875
    """

    kind: ClassVar[str] = "image"

    size: int
    channels: Literal[3, 1] = 3
    crop: float = 1.0
    crop_mode: CropMode = "squash"
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    interpolation: Interpolation = "lanczos"

    def __post_init__(self) -> None:
        _check_whole("size", self.size, 1, _LARGEST_SIDE)
        _check_choice("channels", self.channels, (3, 1))
        _check_number("crop", self.crop, 0.1, 1)
        _check_choice("crop_mode", self.crop_mode, get_args(CropMode))
        _check_choice("interpolation", self.interpolation, get_args(Interpolation))
        for name, least in (("mean", -1e6), ("std", 1e-6)):
            values = getattr(self, name)
            if not isinstance(values, tuple | list) or len(values) not in (1, self.channels):
                _refuse(name, values, f"a number for all or for each of {self.channels} channels")
            for value in values:
                _check_number(name, value, least, 1e6)
            object.__setattr__(self, name, tuple(map(float, values)))

    def batch(self, items: Sequence[bytes | str | os.PathLike[str]]) -> Tensor:
        """Read, scale and stack images: `[N, channels, size, size]`."""
        _check_batch(items)
        stacked = np.stack([self.pixels(item, number) for number, item in enumerate(items)])
        x = to_float(torch.from_numpy(stacked))  # [N, C, size, size]
        return x if self.is_plain else Scaling(self.mean, self.std)(x)

    @property
    def is_plain(self) -> bool:
        """Whether `mean` and `std` leave pixels as they are, black as 0 and white as 1."""
        return not any(self.mean) and set(self.std) == {1.0}

    def pixels(self, item: bytes | str | os.PathLike[str], number: int = 0) -> Pixels:
        """One image, scaled and cropped, as bytes `[channels, size, size]`. Errors call an image
        that is given as bytes by its `number` in the batch."""
        if isinstance(item, bytes | bytearray | memoryview):
            where, content = f"image {number + 1}", bytes(item)
            if len(content) > MOST_ENCODED:
                raise DataError(
                    f"{where} has {len(content):,} bytes, expected at most {MOST_ENCODED:,}"
                )
        elif isinstance(item, str | os.PathLike):
            where, content = os.fspath(item), read_image(Path(item))
        else:
            raise DataError(f"an image is given as bytes or a path, got {type(item).__name__}")
        picture = picture_of(content, where, "RGB" if self.channels == 3 else "L")
        return as_pixels(self._scaled(picture, where))

    def _scaled(self, image: "Image.Image", where: str) -> "Image.Image":
        from PIL import Image

        wanted = math.floor(self.size / self.crop)
        width = height = wanted
        if self.crop_mode == "center":
            ratio = max(image.size) / min(image.size)
            # Rounded down, as torchvision does.
            longer = int(wanted * max(image.size) / min(image.size))
            if wanted * longer > _MOST_PIXELS:
                raise DataError(
                    f"{where}: the image is {image.width}×{image.height} pixels, {ratio:,.0f} "
                    f"times as long as wide, which cannot be scaled to {wanted} pixels"
                )
            width, height = (longer, wanted) if image.width > image.height else (wanted, longer)
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling[self.interpolation.upper()])
        left, top = round((width - self.size) / 2), round((height - self.size) / 2)
        if (width, height) == (self.size, self.size):
            return image
        return image.crop((left, top, left + self.size, top + self.size))

    def to_json(self) -> dict[str, Any]:
        return _to_json(self)

    def __str__(self) -> str:
        text = f"{'RGB' if self.channels == 3 else 'grey'} images of {self.size}×{self.size} pixels"
        if self.crop < 1:
            text += f", the middle {self.crop:.1%}"
        if self.crop_mode == "center":
            text += ", sides cut off"
        if not self.is_plain:
            mean, std = ("/".join(f"{v:.4g}" for v in values) for values in (self.mean, self.std))
            text += f", less {mean}, over {std}"
        return f"{text} ({self.interpolation})"


@dataclass(frozen=True)
class TextInput:
    """Texts as token ids, int64 `[N, length]`, cut and padded to that length.

    Args:
        tokenizer: a folder with a tokenizer.json, or the name of a repository on the Hugging Face
            Hub that has one.
        sha256: the hash that the tokenizer.json must have; None to accept any.
        length: tokens per text, to which longer ones are cut and shorter ones padded.
        pad: the id of the padding.
    """

    kind: ClassVar[str] = "text"

    tokenizer: str
    sha256: str | None = None
    length: int = 64
    pad: int = 0

    def __post_init__(self) -> None:
        name = self.tokenizer
        if not isinstance(name, str) or not 0 < len(name) <= 1000 or not name.isprintable():
            _refuse("tokenizer", name, "the path of a folder or a name on the Hugging Face Hub")
        if self.sha256 is not None:
            match = isinstance(self.sha256, str) and re.fullmatch(r"[0-9a-f]{64}", self.sha256)
            if not match:
                _refuse("sha256", self.sha256, "a SHA-256")
        _check_whole("length", self.length, 1, _MOST_TOKENS)
        _check_whole("pad", self.pad, 0, 2**31)

    @classmethod
    def of(cls, tokenizer: str | os.PathLike[str], length: int = 64, pad: int = 0) -> "TextInput":
        """Make an input with the hash that the tokenizer has now."""
        content = cls(os.fspath(tokenizer), None, length, pad).content()
        return cls(os.fspath(tokenizer), hashlib.sha256(content).hexdigest(), length, pad)

    def batch(self, items: Sequence[str]) -> Tensor:
        """Turn texts into token ids, `[N, length]`."""
        _check_batch(items)
        for number, item in enumerate(items):
            if not isinstance(item, str):
                raise DataError(f"text {number + 1} is {type(item).__name__}, expected a string")
            if len(item) > _LONGEST_TEXT:
                raise DataError(
                    f"text {number + 1} has {len(item):,} characters, expected at most "
                    f"{_LONGEST_TEXT:,}"
                )
        ids = [row.ids for row in _loaded_tokenizer(self).encode_batch(list(items))]
        return torch.tensor(ids, dtype=torch.int64)  # [N, length]

    def content(self) -> bytes:
        """Read the tokenizer.json and check its hash."""
        file = _tokenizer_file(self.tokenizer)
        try:
            content = read_regular(file, _MOST_TOKENIZER)
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror or error}") from error
        if self.sha256 not in (None, found := hashlib.sha256(content).hexdigest()):
            raise DataError(
                f"{file} is another tokenizer than the network was made with: its SHA-256 is "
                f"{found}, expected {self.sha256}"
            )
        return content

    def to_json(self) -> dict[str, Any]:
        return _to_json(self)

    def __str__(self) -> str:
        hashed = f", SHA-256 {self.sha256[:8]}…" if self.sha256 else ""
        return f"texts as {self.length} tokens of {self.tokenizer}{hashed}"


@dataclass(frozen=True)
class TensorInput:
    """Plain numbers: lists, arrays or tensors of one shape become a batch `[N, *shape]`.

    Args:
        shape: of one input.
        dtype: of the batch.

    >>> TensorInput((2,)).batch([[1, 2], [3, 4]])
    tensor([[1., 2.],
            [3., 4.]])
    """

    kind: ClassVar[str] = "tensor"

    shape: tuple[int, ...]
    dtype: Kind = "float32"

    def __post_init__(self) -> None:
        if not isinstance(self.shape, tuple | list) or len(self.shape) > 8:
            _refuse("shape", self.shape, "a list of at most 8 sizes")
        for size in self.shape:
            _check_whole("shape", size, 1, _MOST_NUMBERS)
        if math.prod(self.shape) > _MOST_NUMBERS:
            _refuse("shape", self.shape, f"at most {_MOST_NUMBERS:,} numbers")
        _check_choice("dtype", self.dtype, get_args(Kind))
        object.__setattr__(self, "shape", tuple(self.shape))

    def batch(self, items: Sequence[Any]) -> Tensor:
        """Convert and stack inputs, `[N, *shape]`."""
        _check_batch(items)
        return torch.stack([self._one(item, number) for number, item in enumerate(items)])

    def _one(self, item: Any, number: int) -> Tensor:
        where = f"input {number + 1}"
        try:
            given = torch.as_tensor(item)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise DataError(f"{where} is not numbers of shape {list(self.shape)}") from None
        if given.shape != self.shape:
            raise DataError(f"{where} is of shape {list(given.shape)}, expected {list(self.shape)}")
        whole = not (given.is_floating_point() or given.is_complex())
        if given.is_complex() or (self.dtype == "int64" and not whole):
            wanted = "whole numbers" if self.dtype == "int64" else "numbers"
            raise DataError(f"{where} is {given.dtype}, expected {wanted}")
        x: Tensor = given.detach().cpu().to(getattr(torch, self.dtype))
        if not whole and not x.isfinite().all():
            raise DataError(f"{where} holds NaN or infinity")
        return x

    def to_json(self) -> dict[str, Any]:
        return _to_json(self)

    def __str__(self) -> str:
        return f"{self.dtype} numbers of shape {list(self.shape)}"


Input = ImageInput | TextInput | TensorInput

_KINDS: dict[str, type[ImageInput | TextInput | TensorInput]] = {
    kind.kind: kind for kind in (ImageInput, TextInput, TensorInput)
}


def from_json(data: Any) -> Input:
    """The inverse of `to_json`. Data that describes no input raises `DataError`.

    >>> from_json({"kind": "tensor", "shape": [4], "dtype": "float32"})
    TensorInput(shape=(4,), dtype='float32')
    """
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
        _refuse("an input", data, "an object with its kind")
    if (kind := _KINDS.get(data["kind"])) is None:
        _refuse("an input's kind", data["kind"], f"one of {', '.join(_KINDS)}")
    rest = {key: value for key, value in data.items() if key != "kind"}
    known = {item.name for item in fields(kind)}
    for key in rest.keys() - known:
        raise DataError(f"an input of kind {kind.kind} has an unknown entry {reprlib.repr(key)}")
    for key in known - rest.keys():
        raise DataError(f"an input of kind {kind.kind} has no {key!r}")
    return kind(**rest)


def _to_json(given: Input) -> dict[str, Any]:
    values = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(given).items()}
    return {"kind": given.kind, **values}


def _tokenizer_file(name: str) -> Path:
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        if not (folder / _TOKENIZER).exists():
            raise DataError(
                f"{folder} has no {_TOKENIZER}: write one with "
                "AutoTokenizer.from_pretrained(…).save_pretrained(…) of transformers"
            )
        return folder / _TOKENIZER
    from huggingface_hub import hf_hub_download

    failed = f"the tokenizer {name!r} is neither a folder nor to be had from the Hugging Face Hub"
    with in_one_sentence(failed, DataError):
        return Path(hf_hub_download(name, _TOKENIZER))


@lru_cache(maxsize=16)  # a server, with a batch every few ms, reads and hashes the file once
def _loaded_tokenizer(given: TextInput) -> Any:
    try:
        from tokenizers import Tokenizer  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise DataError(
            "texts need the package tokenizers, which comes with pip install 'rankup[real]'"
        ) from None
    content = given.content()
    try:
        tokenizer = Tokenizer.from_str(content.decode())
        tokenizer.enable_truncation(given.length)
        token = tokenizer.id_to_token(given.pad) or ""
        tokenizer.enable_padding(pad_id=given.pad, pad_token=token, length=given.length)
    except Exception as error:  # tokenizers raises plain Exception
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"the {_TOKENIZER} cannot be used: {reason}") from error
    return tokenizer


def _check_batch(items: Any) -> None:
    if isinstance(items, str | bytes) or not isinstance(items, Sequence | Tensor | np.ndarray):
        raise DataError(f"a batch is a list of inputs, got {type(items).__name__}")
    if not len(items):
        raise DataError("a batch has at least one input, got none")


def _check_whole(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        _refuse(name, value, f"a whole number from {least} to {most}")


def _check_number(name: str, value: Any, least: float, most: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        _refuse(name, value, f"a number from {least:g} to {most:g}")


def _check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    if isinstance(value, bool) or not isinstance(value, str | int) or value not in choices:
        _refuse(name, value, f"one of {', '.join(map(str, choices))}")


def _refuse(name: str, value: Any, wanted: str) -> NoReturn:
    raise DataError(f"{name} is {reprlib.repr(value)}, expected {wanted}")

"""Augmented batches from a table of images in bytes, in one launch, where torch's own operations
take seventeen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PIXELS = 512  # of an image per program


def augmented(
    images: Tensor,
    rows: Tensor,
    coins: Tensor,
    offsets: Tensor,
    pad: int,
    pixels: str,
    channels_last: bool = False,
) -> Tensor:
    """The bits of `scaled(to_float(augment(images[rows], …)))`, float32 `[B, C, H, W]`.

    Args:
        images: bytes, `[N, C, H, W]`.
        rows: the indices of the batch's images, `[B]`.
        coins: whether to mirror each, `[B]`.
        offsets: the top left corner of each window in the image padded by `pad` pixels, `[B, 2]`.
        pad: pixels on each side, by reflection.
        pixels: how pixels are scaled, as in `Recipe`.
        channels_last: whether the batch is in channels-last order.
    """
    _, channels, height, width = images.shape
    batch = torch.empty(
        *(len(rows), channels, height, width),
        dtype=torch.float32,
        device=images.device,
        memory_format=torch.channels_last if channels_last else torch.contiguous_format,
    )
    _augment[(len(rows), triton.cdiv(height * width, _PIXELS))](
        *(images, rows, coins, offsets, batch),
        PAD=pad,
        CHANNELS=channels,
        HEIGHT=height,
        WIDTH=width,
        CENTRED=pixels == "centred",
        RAW=pixels == "raw",
        LAST=channels_last,
        PIXELS=_PIXELS,
    )
    return batch


@triton.jit
def _reflected(place, SIZE: tl.constexpr):
    return SIZE - 1 - tl.abs(SIZE - 1 - tl.abs(place))


@triton.jit
def _augment(
    images, rows, coins, offsets, batch,
    PAD: tl.constexpr, CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    CENTRED: tl.constexpr, RAW: tl.constexpr, LAST: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    is_there = pixel < HEIGHT * WIDTH
    down = tl.load(offsets + 2 * sample).to(tl.int32) - PAD
    right = tl.load(offsets + 2 * sample + 1).to(tl.int32) - PAD
    y = _reflected(pixel // WIDTH + down, HEIGHT)
    x = _reflected(pixel % WIDTH + right, WIDTH)
    x = tl.where(tl.load(coins + sample) != 0, WIDTH - 1 - x, x)
    source = images + tl.load(rows + sample) * (CHANNELS * HEIGHT * WIDTH) + y * WIDTH + x
    target = batch + sample * (CHANNELS * HEIGHT * WIDTH)
    for channel in tl.static_range(CHANNELS):
        value = tl.load(source + channel * HEIGHT * WIDTH, mask=is_there, other=0).to(tl.float32)
        value *= 1 / 255
        if CENTRED:
            value = value * 2 - 1
        if RAW:
            value *= 255
        place = pixel * CHANNELS + channel if LAST else channel * HEIGHT * WIDTH + pixel
        tl.store(target + place, value, mask=is_there)

"""Features of natural images that no task has learned: what seeded wave-like filters find in small
patches, alike in an image and in its mirror image.

Whole numbers from one end to the other: sums are of whole numbers that float32 or float64 holds, so
their order does not matter, and all else is a correctly rounded product or quotient, soon a whole
number again. So a CPU and a GPU, and batches of any size, find exactly the same features. Square
roots of float32 are not the same everywhere, and a GPU divides by a plain number by multiplying
with its inverse: there is neither.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rankup import seeds
from rankup.errors import RankupError
from rankup.net.routers.features import STEPS

_SMALLEST = 24  # pixels each way of an image with patches worth comparing
_CHANNELS = 4  # at most: filters' sums of bytes stay below 2²⁴, which float32 holds
_SIDE = 32  # larger images are averaged to about so many pixels each way
_STRIDE = 2  # pixels from patch to patch
_WEIGHT = 16.0  # root mean square of a filter's whole numbers
_FLAT = 10  # grey levels of contrast below which a patch counts as flat
_UNIT = 64.0  # whole numbers in a response as strong as the patch's contrast
_COLOURS = 4  # places each way over which colours are averaged
_SIZES = ((3, 3), (5, 3), (8, 2))  # pixels of a patch and places each way to average over
_STARTS = (0, 1)  # pixels, down and to the right, at which the first patches are
_THRESHOLD = 8.0  # of a response, below which nothing was found
_PER_UNIT = 64.0  # steps² of a feature
_MOST = 2 * STEPS  # steps of a feature; nearly all natural images stay below


def refuse_no_images(inputs: Tensor) -> None:
    shape = inputs.shape
    if len(shape) != 4 or shape[1] > _CHANNELS or min(shape[-2:]) < _SMALLEST:
        raise RankupError(
            f"a router with patches compares images of at least {_SMALLEST}×{_SMALLEST} pixels and "
            f"at most {_CHANNELS} channels, got inputs of shape {list(shape[1:])}: leave out "
            "'patches' for these"
        )


def patch_features(images: Tensor, count: int, seed: int) -> Tensor:
    """`[B, D]`: about `count` features of images `[B, C, H, W]`, in whole numbers from −127 to 127.

    Those of an image and of its mirror image are the same: what both would say apart from each
    other hardly tells classes, and takes twice the features.
    """
    refuse_no_images(images)
    with torch.autocast(images.device.type, enabled=False):
        pixels = _levels(images)
        colours = _colours(pixels)
        share = (count - colours.shape[1]) / len(_SIZES)
        found = [_found(pixels, size, grid, share, seed) for size, grid in _SIZES]
    return torch.cat([colours, *found], 1) - STEPS


def _levels(images: Tensor) -> Tensor:
    """Whole numbers from 0 to 255, each image's darkest and brightest, in float32."""
    images = images.float()
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    spread = torch.where(high > low, high - low, torch.ones_like(low))
    pixels = ((images - low) / spread * 255).round()
    step = min(images.shape[-2:]) // _SIDE
    return (_sums(pixels, step, step) * (1 / step**2)).round() if step > 1 else pixels


def _colours(pixels: Tensor) -> Tensor:
    """`[B, 16·C]`: each channel's mean, and twice its spread, at each place in the left half and at
    the one that is there in the mirror image."""
    sides = torch.stack([pixels, pixels.flip(3)]).double().flatten(0, 1)
    totals, squares = (_at_places(x, _COLOURS)[0] for x in (sides, sides.square()))
    numbers = math.prod(_at_places(sides, _COLOURS)[1])
    spread = numbers * squares - totals.square()
    half = slice(_COLOURS // 2)
    means, spreads = (torch.add(*x.chunk(2))[..., half] for x in (totals, spread))
    means = (means * (1 / (2 * numbers))).floor().clamp(max=_MOST)
    return torch.cat([means.float().flatten(1), _root(spreads, numbers**2 / 2)], 1)


def _found(pixels: Tensor, size: int, grid: int, count: float, seed: int) -> Tensor:
    """`[B, K·grid²]`: how much of each of K filters is at each place."""
    filters = max(1, round(count / grid**2))
    bank = torch.from_numpy(_filters(filters, pixels.shape[1], size, seed)).to(pixels.device)
    contrast = _contrast(pixels, size)
    rows, columns = ((side - size - _STARTS[-1]) // _STRIDE + 1 for side in pixels.shape[-2:])
    total = pixels.new_zeros(1)
    for start in _STARTS:
        for x, spread in ((pixels, contrast), (pixels.flip(3), contrast.flip(3))):
            sides = _responses(x[..., start:, start:], spread[..., start:, start:], bank)
            total = total + sides[..., :rows, :columns]
    total, windows = _at_places(total, grid)
    return _root(total, math.prod(windows) * len(_STARTS) / _PER_UNIT)


def _at_places(x: Tensor, grid: int) -> tuple[Tensor, list[int]]:
    """Sums over `grid²` windows, and the windows' sides."""
    windows = [math.ceil(side / grid) for side in x.shape[-2:]]
    steps = [(x.shape[i - 2] - windows[i]) // (grid - 1) for i in (0, 1)]
    return F.avg_pool2d(x, windows, steps, divisor_override=1), windows


def _root(total: Tensor, unit: float) -> Tensor:
    """`[B, …]`: the square root in units of `unit`'s, rounded, by comparing alone."""
    halves = torch.arange(_MOST, dtype=total.dtype, device=total.device) + 0.5
    return torch.bucketize(total.flatten(1), halves**2 * unit).float()


def _responses(pixels: Tensor, contrast: Tensor, bank: Tensor) -> Tensor:
    """`[B, K, h, w]`: how strongly each filter answers to each patch."""
    # Exact: no library takes Fourier or Winograd transforms with a stride, and TF32 holds bytes.
    found = F.conv2d(pixels, bank, stride=_STRIDE).round()
    contrast = contrast[:, :, ::_STRIDE, ::_STRIDE]
    unit = _UNIT / _WEIGHT * math.sqrt(bank[0].numel())
    return F.relu((found * unit / contrast).round() - _THRESHOLD)


def _contrast(pixels: Tensor, size: int) -> Tensor:
    """`[B, 1, h, w]`: the spread of grey levels in the patch at every pixel, times its numbers."""
    exact, numbers = pixels.double(), pixels.shape[1] * size**2
    total = _sums(exact.sum(1, keepdim=True), size, 1)
    squares = _sums(exact.square().sum(1, keepdim=True), size, 1)
    spread = numbers * squares - total.square()  # numbers² times the variance
    # No whole number's square root is so near to halfway between floats that float64 would err.
    return (spread + (_FLAT * numbers) ** 2).sqrt().float()


def _sums(x: Tensor, size: int, stride: int) -> Tensor:
    return F.avg_pool2d(x, size, stride, divisor_override=1)


@lru_cache(maxsize=16)
def _filters(count: int, channels: int, size: int, seed: int) -> np.ndarray:
    """`[count, channels, size, size]`: waves of random direction, length, place and colour that
    fade out, as are the best filters for natural images (Coates, Ng and Lee, 2011). Whole numbers
    that add up to 0, so that the last bits of a machine's cosine do not show."""
    drawn = _uniform(seed, size, count, 8 + channels)[..., None, None]
    angle, length, phase, width, shape, left, up, coloured = drawn.swapaxes(0, 1)[:8]
    places = np.arange(size) - (size - 1) / 2
    x, y = places - (left - 0.5) * 0.4 * size, places[:, None] - (up - 0.5) * 0.4 * size
    cosine, sine = np.cos(np.pi * angle), np.sin(np.pi * angle)
    along, across = x * cosine + y * sine, y * cosine - x * sine
    stretch, fading = 0.6 + 0.6 * shape, size * (0.2 + 0.25 * width)
    wave = np.cos(2 * np.pi * (0.08 * (0.45 / 0.08) ** length * along + phase))
    wave = wave * np.exp(-(along**2 / stretch + across**2 * stretch) / (2 * fading**2))
    colours = np.where(coloured[:, None] < 0.5, 2 * drawn[:, 8:] - 1, 1.0)
    flat = (colours * wave[:, None]).reshape(count, -1)
    flat = flat - flat.mean(1, keepdims=True)
    flat = flat * (_WEIGHT / np.sqrt((flat**2).mean(1, keepdims=True)))
    whole = np.diff(np.rint(np.cumsum(flat, 1)), prepend=0, axis=1).astype(np.float32)
    bank: np.ndarray = whole.reshape(count, channels, size, size)
    return bank


def _uniform(seed: int, size: int, rows: int, columns: int) -> np.ndarray:
    """Random numbers from 0 to 1, by integer arithmetic alone."""
    bits = seeds.sign_bits(seed, "router", f"patches of {size}", 16 * rows * columns)
    numbers: np.ndarray = np.frombuffer(bits, dtype="<u2").reshape(rows, columns)
    drawn: np.ndarray = (numbers + 0.5) / 65536
    return drawn

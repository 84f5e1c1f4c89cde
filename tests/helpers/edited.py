"""Files of a method that somebody edited, with and without hashes that fit."""

import random
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from rankup.layers import Tensors


def weights_in(folder: Path) -> Path:
    """The one file of weights in a method's folder, or in the last of several."""
    return sorted(folder.rglob("weights-*.safetensors"))[-1]


def broken(content: bytes, draw: random.Random) -> Iterator[bytes]:
    """A file with bits flipped, truncated, or longer."""
    for place in (0, 8, draw.randrange(len(content)), len(content) - 1):
        flipped = content[place] ^ 1 << draw.randrange(8)
        yield content[:place] + bytes([flipped]) + content[place + 1 :]
    for length in (0, 7, draw.randrange(len(content)), len(content) - 1):
        yield content[:length]
    yield content + b"\0"
    yield content[::-1]


def misfits(tensors: Tensors, draw: random.Random) -> Iterator[Tensors]:
    """Tensors of which one is not what any method could have saved."""
    name = draw.choice(sorted(tensors))
    others = {key: tensor for key, tensor in tensors.items() if key != name}
    yield others
    yield {**others, f"{name}x": tensors[name]}
    yield {**others, f"7{name}\n\x1b": tensors[name]}
    group = draw.choice(["shared", "kept", "buffer", "0", "99", "more"])
    yield {**tensors, f"{group}/more": torch.ones(2)}
    for tensor in _unlike(tensors[name]):
        yield {**others, name: tensor}
    floats = sorted(key for key, t in tensors.items() if t.is_floating_point() and t.numel())
    for value in (torch.nan, torch.inf, -torch.inf):
        name = draw.choice(floats)
        yield {**tensors, name: _with(tensors[name], value, draw)}


def _unlike(tensor: Tensor) -> Iterator[Tensor]:
    """Of other shapes and dtypes."""
    yield tensor[None].contiguous()
    yield tensor.flatten()[:0] if tensor.dim() > 1 else torch.zeros(3, 1).to(tensor)
    yield torch.cat([tensor.flatten()] * 2 + [tensor.flatten()[:1]])[None, None]
    yield tensor.double() if tensor.is_floating_point() else tensor.float()
    yield tensor.to(torch.int64) * 0 - 1
    yield tensor.to(torch.int64) * 0 + 2**62
    yield tensor.bool()


def _with(tensor: Tensor, value: float, draw: random.Random) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[draw.randrange(changed.numel())] = value
    return changed

"""Packing small whole numbers into bytes without gaps, so that they are stored in as many bits as
`Footprint` counts."""

import torch
import torch.nn.functional as F
from torch import Tensor


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Pack whole numbers below 2**bits into bytes: the lowest bits of all numbers, then the next
    bits, and so on.

    >>> pack(torch.tensor([1, 3, 0, 2, 1]), 2)
    tensor([83,  1], dtype=torch.uint8)
    """
    numbers = numbers.flatten()
    planes = torch.cat([(numbers >> place & 1).to(torch.uint8) for place in range(bits)])
    eights = F.pad(planes, (0, -len(planes) % 8)).view(-1, 8)
    return (eights << _eight(eights)).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Undo `pack`, which was given `count` numbers.

    >>> unpack(pack(torch.tensor([1, 3, 0, 2, 1]), 2), 2, 5)
    tensor([1, 3, 0, 2, 1], dtype=torch.int32)
    """
    planes = (packed[:, None] >> _eight(packed) & 1).flatten()[: bits * count].view(bits, count)
    numbers = torch.zeros(count, dtype=torch.int32, device=packed.device)
    for place, plane in enumerate(planes):
        numbers += plane.int() << place
    return numbers


def packed_size(count: int) -> int:
    """The number of bytes that `count` bits take."""
    return (count + 7) // 8


def stray_bits(packed: Tensor, count: int) -> str | None:
    """A message if bits after the first `count` of a row are set, which `pack` never does.

    >>> stray_bits(torch.tensor([83, 1], dtype=torch.uint8), 10)
    >>> stray_bits(torch.tensor([83, 4], dtype=torch.uint8), 10)
    'has bits set after its 10th'
    """
    if count % 8 and bool((packed[..., -1:] >> count % 8).any()):
        return f"has bits set after its {count}th"
    return None


def _eight(like: Tensor) -> Tensor:
    """0 to 7, on the same device."""
    return torch.arange(8, dtype=torch.uint8, device=like.device)

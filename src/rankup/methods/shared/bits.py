"""Small whole numbers packed as bits without gaps, so that stored size equals counted size."""

import torch
import torch.nn.functional as F
from torch import Tensor


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Whole numbers below 2**bits as bytes: the lowest bits of all of them, then the next bits.

    >>> pack(torch.tensor([1, 3, 0, 2, 1]), 2)
    tensor([83,  1], dtype=torch.uint8)
    """
    numbers = numbers.flatten()
    planes = torch.cat([(numbers >> place & 1).to(torch.uint8) for place in range(bits)])
    eights = F.pad(planes, (0, -len(planes) % 8)).view(-1, 8)
    return (eights << _eight(eights)).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The `count` numbers that were packed.

    >>> unpack(pack(torch.tensor([1, 3, 0, 2, 1]), 2), 2, 5)
    tensor([1, 3, 0, 2, 1], dtype=torch.int32)
    """
    planes = (packed[:, None] >> _eight(packed) & 1).flatten()[: bits * count].view(bits, count)
    numbers = torch.zeros(count, dtype=torch.int32, device=packed.device)
    for place, plane in enumerate(planes):
        numbers += plane.int() << place
    return numbers


def packed_size(count: int) -> int:
    """How many bytes so many bits take."""
    return (count + 7) // 8


def stray_bits(packed: Tensor, count: int) -> str | None:
    """What is wrong if bits after the first `count` of each row are set; packing sets none.

    >>> stray_bits(torch.tensor([83, 1], dtype=torch.uint8), 10)
    >>> stray_bits(torch.tensor([83, 4], dtype=torch.uint8), 10)
    'has bits set after its 10th'
    """
    if count % 8 and bool((packed[..., -1:] >> count % 8).any()):
        return f"has bits set after its {count}th"
    return None


def _eight(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)

"""Many tensors in one: what an optimiser changes in one go, and what it is made of."""

import math
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from rankup.layers import Tensors

_ALIGNED = 32  # numbers


def views(flat: Tensor, like: Tensors) -> Tensors:
    """Parts of `flat` in the shapes of `like`, behind a leading dimension where it has one."""
    parts = torch.split(flat, [room(tensor) for tensor in like.values()], -1)
    return {
        name: part[..., : tensor.numel()].view((*flat.shape[:-1], *tensor.shape))
        for (name, tensor), part in zip(like.items(), parts, strict=True)
    }


def gathered(grads: Iterable[Tensor], leading: int, out: Tensor | None = None) -> Tensor:
    """What `views` takes apart; all but `leading` dimensions become one."""
    parts: list[Tensor] = []
    for each in grads:
        grad = each.to_dense() if each.is_sparse else each
        if leading == 0 and not grad.is_cuda:  # in less time, as nothing is aligned
            parts.append(grad.reshape(-1))
            continue
        row = grad.reshape(*grad.shape[:leading], -1)
        parts.append(row)
        single = grad if leading == 0 else grad[0]
        if gap := room(single) - single.numel():
            parts.append(_zeros((*row.shape[:-1], gap), row.dtype, row.device))
    return torch.cat(parts, -1, out=out)


def room(tensor: Tensor) -> int:
    """Numbers that a tensor takes in a flat one: a GPU's kernels want each of them aligned."""
    unit = _ALIGNED if tensor.device.type == "cuda" else 1
    return math.ceil(tensor.numel() / unit) * unit


@cache  # so that a captured step does not make them again and again
def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)

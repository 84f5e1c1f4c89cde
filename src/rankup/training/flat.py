"""Many tensors in one flat tensor, which an optimiser updates in one go."""

import math
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from rankup.layers import Tensors

_ALIGNED = 32  # numbers


def views(flat: Tensor, like: Tensors) -> Tensors:
    """Views of `flat` in the shapes of `like`, after its leading dimension if it has one."""
    parts = torch.split(flat, [room(tensor) for tensor in like.values()], -1)
    return {
        name: part[..., : tensor.numel()].view((*flat.shape[:-1], *tensor.shape))
        for (name, tensor), part in zip(like.items(), parts, strict=True)
    }


def gathered(grads: Iterable[Tensor], leading: int, out: Tensor | None = None) -> Tensor:
    """The inverse of `views`: all but `leading` dimensions become one."""
    parts: list[Tensor] = []
    for each in grads:
        grad = each.to_dense() if each.is_sparse else each
        if leading == 0 and not grad.is_cuda:  # faster, as nothing is aligned
            parts.append(grad.reshape(-1))
            continue
        row = grad.reshape(*grad.shape[:leading], -1)
        parts.append(row)
        single = grad if leading == 0 else grad[0]
        if gap := room(single) - single.numel():
            parts.append(_zeros((*row.shape[:-1], gap), row.dtype, row.device))
    return torch.cat(parts, -1, out=out)


def room(tensor: Tensor) -> int:
    """Numbers that a tensor takes up in a flat one: GPU kernels want each tensor aligned."""
    unit = _ALIGNED if tensor.device.type == "cuda" else 1
    return math.ceil(tensor.numel() / unit) * unit


@cache  # so that a captured step does not make them again and again
def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)

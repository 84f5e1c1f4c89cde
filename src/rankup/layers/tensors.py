"""Helpers for tensors and dtypes: copies, and shapes that broadcast over a batch."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

Tensors = dict[str, Tensor]

ALIGNED = 64  # bytes: where torch lets a tensor begin


def row_by_row(
    tensor: Tensor, device: torch.device, dtype: torch.dtype, copy: bool = True
) -> Tensor:
    """A contiguous, aligned copy, as loading from a file gives it: torch may compute different bits
    from a tensor with other strides or at another alignment.

    Args:
        copy: if False, a tensor that is like that already is returned as it is.
    """
    alike = tensor.is_contiguous() and (tensor.device, tensor.dtype) == (device, dtype)
    if not copy and alike and tensor.data_ptr() % ALIGNED == 0:
        return tensor
    return tensor.to(device, dtype, copy=True, memory_format=torch.contiguous_format)


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name without the prefix `torch.`."""
    return str(dtype).removeprefix("torch.")


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in with numbers that are stored in this one."""
    return torch.promote_types(dtype, torch.float32)


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which products with `x` are computed: its own, or that of autocast, which leaves
    float64 alone."""
    if x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def needs_torchs_operations() -> bool:
    """Whether torch.compile, a torch.func transform or forward-mode differentiation is active. None
    of them supports our own autograd functions or tensors cached between calls."""
    return torch.compiler.is_compiling() or (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    )


def over_last(rows: Tensor, x: Tensor) -> Tensor:
    """Broadcast rows per sample, `[B, n]`, over the dimensions between the first and the last of x.

    >>> over_last(torch.zeros(2, 5), torch.zeros(2, 7, 8, 5)).shape
    torch.Size([2, 1, 1, 5])
    """
    between = x.dim() - rows.dim()
    return rows.view(rows.shape[0], *(1,) * between, *rows.shape[1:])


def over_channels(rows: Tensor, x: Tensor) -> Tensor:
    """Broadcast rows per sample, `[B, C]`, over the dimensions that follow the channels of x.

    >>> over_channels(torch.zeros(2, 5), torch.zeros(2, 5, 7, 8)).shape
    torch.Size([2, 5, 1, 1])
    """
    return over_space(rows, x.dim() - 2)


def over_space(rows: Tensor, dims: int) -> Tensor:
    """Append `dims` dimensions of size 1, to broadcast numbers per channel over space."""
    return rows[(..., *(None,) * dims)]

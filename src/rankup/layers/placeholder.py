"""A stand-in for weights that have no single value."""

from typing import Any

import torch
from torch import Tensor

from rankup.errors import TaskStateError


class Placeholder:
    """A weight of which only shape, dtype and device can be read, as a module's forward does in
    `x.to(self.conv.weight.dtype)`. Anything else raises a `TaskStateError` with the given text.
    """

    def __init__(
        self, shape: torch.Size, refusal: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape, self.dtype, self.device, self.ndim = shape, dtype, device, len(shape)
        self.refusal = refusal

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def __getattr__(self, name: str) -> Any:
        raise TaskStateError(self.refusal)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        placeholder = next(arg for arg in (*args, *(kwargs or {}).values()) if type(arg) is cls)
        if func in (Tensor.to, Tensor.type_as):
            return args[0].to(placeholder.device, placeholder.dtype)
        raise TaskStateError(placeholder.refusal)

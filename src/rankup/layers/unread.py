"""Tensors of which only the kind can be read: what a mixed batch gets in place of one task's."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rankup.errors import TaskStateError

_PROPERTIES = ("dtype", "device", "shape", "ndim", "is_cuda")
_METHODS = ("size", "dim", "numel", "is_floating_point")
_SAME_KIND = (Tensor.to, Tensor.type_as)  # allowed where another tensor is converted to its kind
_LOOKS = {getattr(Tensor, name).__get__ for name in _PROPERTIES} | {
    getattr(Tensor, name) for name in _METHODS
}


class Unread(Tensor):
    """A stand-in for a weight of which a module's forward only reads the kind, as in
    `x.to(self.conv.weight.dtype)`. Anything that needs its values is refused."""

    refusal: str

    @classmethod
    def of(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, refusal: str
    ) -> "Unread":
        made = torch.empty((), dtype=dtype, device=device).expand(*shape).as_subclass(cls)
        made.refusal = refusal
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _LOOKS or (func in _SAME_KIND and not isinstance(args[0], cls)):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        refused = (arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, cls))
        raise TaskStateError(next((arg.refusal for arg in refused), "no numbers are there"))

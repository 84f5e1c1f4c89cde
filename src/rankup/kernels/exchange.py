"""A torch mode in which kernels replace torch's operations."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from rankup.kernels import conv, norm

# For each operation, whether our kernel takes the given arguments, and the kernel.
_OURS: dict[Callable[..., Any], tuple[Callable[..., bool], Callable[..., Any]]] = {
    F.batch_norm: (norm.fits, norm.batch_norm),
    torch.conv2d: (conv.fits, conv.conv2d),
}


class Exchange(TorchFunctionMode):
    """Inside, kernels replace torch's operations wherever they take the arguments."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        fits, kernel = _OURS.get(function, (None, function))
        if fits and not _is_watched() and fits(*args, **options):
            return kernel(*args, **options)
        return function(*args, **options)


def _is_watched() -> bool:
    """Whether a torch.func transform is active, which does not support our autograd functions, or
    hooks on saved tensors are, such as of checkpointing: they run operations again in the backward
    pass, outside of this mode."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None or torch._C._are_functorch_transforms_active()

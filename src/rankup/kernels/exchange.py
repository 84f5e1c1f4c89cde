"""Torch operations that our kernels stand for."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from rankup.kernels import conv, norm

# A check whether arguments fit, and what then takes them.
_OURS: dict[Callable[..., Any], tuple[Callable[..., bool], Callable[..., Any]]] = {
    F.batch_norm: (norm.fits, norm.batch_norm),
    torch.conv2d: (conv.fits, conv.conv2d),
}


class Exchange(TorchFunctionMode):
    """Inside, our kernels take over wherever these are called with arguments that fit."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        fits, kernel = _OURS.get(function, (None, function))
        if fits and not _is_watched() and fits(*args, **given):
            return kernel(*args, **given)
        return function(*args, **given)


def _is_watched() -> bool:
    """Whether a torch.func transform is active, which does not support nodes of ours, or hooks take
    saved tensors, as for recomputing them in a backward pass, which no mode reaches."""
    kept = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return kept is not None or torch._C._are_functorch_transforms_active()

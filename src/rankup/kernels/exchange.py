"""Operations of torch that kernels of ours stand for."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from rankup.kernels import conv, norm

# What says whether arguments fit, and what then takes them.
_OURS: dict[Callable[..., Any], tuple[Callable[..., bool], Callable[..., Any]]] = {
    F.batch_norm: (norm.fits, norm.batch_norm),
    torch.conv2d: (conv.fits, conv.conv2d),
}


class Exchange(TorchFunctionMode):
    """Inside, they are done by our kernels wherever they are called, if these are made for it."""

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
    """Whether torch.func maps what is computed, which knows no nodes of ours; or whether somebody
    keeps what it saves, as to compute it once more in a backward pass, which no mode reaches."""
    kept = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return kept is not None or torch._C._are_functorch_transforms_active()

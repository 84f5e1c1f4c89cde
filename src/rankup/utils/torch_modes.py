"""Context managers for modes: of modules, of autograd and of autocast."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from weakref import WeakKeyDictionary

import torch
from torch import nn


@contextmanager
def learning_on(device: torch.device) -> Iterator[None]:
    """Inside, gradients are enabled and deterministic, and the caller's autocast is off: it would
    use copies of weights that it cached before the first step."""
    enabled, cached = torch.is_autocast_enabled(device.type), torch.is_autocast_cache_enabled()
    deterministic = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    if enabled:
        torch.set_autocast_enabled(device.type, False)
        torch.set_autocast_cache_enabled(False)
    try:
        with torch.enable_grad():
            yield
    finally:
        torch.backends.cudnn.deterministic = deterministic
        if enabled:
            torch.set_autocast_enabled(device.type, True)
            torch.set_autocast_cache_enabled(cached)


@contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Afterwards, every submodule is back in the mode it was in."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    try:
        yield
    finally:
        for submodule, training in modes:
            submodule.training = training


@dataclass
class _Evaluated:
    training: list[nn.Module]  # which were in training mode
    threads: int = 0


_entering = Lock()
_evaluated: WeakKeyDictionary[nn.Module, _Evaluated] = WeakKeyDictionary()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Inside, the module is in evaluation mode. Afterwards, submodules that were in training mode
    are so again; the others are left alone. Of several threads the last one to leave does this."""
    with _entering:
        if module not in _evaluated:
            _evaluated[module] = _Evaluated([m for m in module.modules() if m.training])
        state = _evaluated[module]
        state.threads += 1
        module.eval()
    try:
        yield
    finally:
        with _entering:
            state.threads -= 1
            if not state.threads:
                del _evaluated[module]
                for submodule in state.training:
                    submodule.training = True

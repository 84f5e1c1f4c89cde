"""Training and evaluation mode of modules, and modes of torch."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn


@contextmanager
def outside_inference() -> Iterator[None]:
    """Leave torch's inference mode, wherever this is called: tensors made in it can never be
    trained, so all that makes those of a network runs in here."""
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        yield


@contextmanager
def learning_on(device: torch.device) -> Iterator[None]:
    """Inside, gradients are enabled and deterministic, and the caller's autocast is off: it would
    go on using the copies of weights that it cached before the first step."""
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
    """Afterwards, whatever happens, every part of the module is back in the mode it was in."""
    before = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, training in before:
            part.training = training


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Inside, the module is in evaluation mode; afterwards as it was before. Parts that were so
    already are left alone: another thread may have begun to learn meanwhile."""
    learning = [part for part in module.modules() if part.training]
    try:
        module.eval()
        yield
    finally:
        for part in learning:
            part.training = True


def has_hooks(module: nn.Module) -> bool:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, key) for key in hooks)

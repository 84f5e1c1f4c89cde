"""Training and evaluation mode of modules, hooks that change what they do, and modes of torch."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn


@contextmanager
def outside_inference() -> Iterator[None]:
    """Tensors that were made in torch's inference mode can never be learned from: what makes those
    of a network does so in here, wherever it is called."""
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        yield


@contextmanager
def learning_on(device: torch.device) -> Iterator[None]:
    """Inside, torch takes gradients, the same ones every time, and computes in no precision but
    that it is told there. Copies of weights that somebody's autocast keeps until its end would be
    those before the first step."""
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


def has_hooks(part: nn.Module) -> bool:
    return bool(
        part._forward_hooks
        or part._forward_pre_hooks
        or part._backward_hooks
        or part._backward_pre_hooks
    )


@contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """After it, whatever happens, every part of the module is in the mode that it was in before."""
    before = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, training in before:
            part.training = training


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Inside, the module is in evaluation mode; after it as it was before."""
    with modes_kept(module):
        module.eval()
        yield

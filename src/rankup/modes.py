"""Training and evaluation mode of modules, hooks that change what they do, and modes of torch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import nn

P = ParamSpec("P")
T = TypeVar("T")


def outside_inference(function: Callable[P, T]) -> Callable[P, T]:
    """Tensors that were made in torch's inference mode can never be learned from: what makes those
    of a network does so outside of it, wherever it is called."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return wrapped


@contextmanager
def learning_on(device: torch.device) -> Iterator[None]:
    """Inside, torch takes gradients, and computes in the precision that it is told there: autocast
    would go on with copies of weights as they were before the first step."""
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        yield


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

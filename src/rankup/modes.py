"""Training and evaluation mode of modules, and hooks that change what they do."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


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

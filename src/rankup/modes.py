"""Training and evaluation mode of modules."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Inside, the module is in evaluation mode; after it, whatever happens, as it was before."""
    mode = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(mode)

"""The memory layout of images: channels last, if a module can take them so, because convolutions
are then faster, on a CPU as on a GPU."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rankup import seeds
from rankup.growing.copying import copy_of
from rankup.layers import CONVOLUTIONS, TaskLayer, active
from rankup.layers.spec import FactoredSpec

# By training mode, in which the module may behave differently, and by the images' shape: a view
# that is possible for one may not be for another.
_FOUND: WeakKeyDictionary[nn.Module, dict[tuple[bool, torch.Size], bool]] = WeakKeyDictionary()


def convolves(body: nn.Module) -> bool:
    return any(map(_is_convolution, body.modules()))


def for_answers(body: nn.Module, x: Tensor) -> Tensor:
    """Inputs as the module answers them fastest: on a CPU in about half the time."""
    return channels_last(x) if x.device.type == "cpu" and takes_channels_last(body, x) else x


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def takes_channels_last(body: nn.Module, x: Tensor) -> bool:
    """Whether the module convolves and can answer images in that layout. One that calls
    `x.view(len(x), -1)` after a convolution cannot.

    Tried once, with two samples, its first task and copies of all that the module might change: the
    answer depends on nothing but the module, its mode and the images' shape.
    """
    if x.dim() != 4 or x.device.type not in ("cpu", "cuda"):
        return False
    found, kind = _FOUND.setdefault(body, {}), (body.training, x.shape[1:])
    if kind not in found:
        if not convolves(body):
            found[kind] = False
        elif _answers(body, channels_last(x[:2])):
            found[kind] = True
        elif _answers(body, x[:2]):
            found[kind] = False
        else:  # it cannot answer these in any layout, which tells nothing
            return False
    return found[kind]


@torch.no_grad()
def trial(body: nn.Module, x: Tensor, task: int) -> Any:
    """A module's answer in a trial run, with copies of all that it might change."""
    layers = (part for part in body.modules() if isinstance(part, TaskLayer))
    tables = {id(t): t for layer in layers for t in layer.buffers()}  # never changed
    own = copy_of(body, tables)  # functional_call would swap the tensors of the module itself
    with active(task), seeds.drawing(x.device, 0):
        return own(x.clone())


def _answers(body: nn.Module, x: Tensor) -> bool:
    try:
        trial(body, x, 0)
    except Exception:  # a module may raise anything
        return False
    return True


def _is_convolution(part: nn.Module) -> bool:
    if isinstance(part, TaskLayer):
        return isinstance(part.spec, FactoredSpec) and part.spec.conv is not None
    return isinstance(part, CONVOLUTIONS)

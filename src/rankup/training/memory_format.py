"""Channels-last images for modules that can run on them, because their convolutions are faster."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rankup import seeds
from rankup.growing.copying import copy_of
from rankup.layers import CONVOLUTIONS, TaskLayer, active
from rankup.layers.spec import FactoredSpec

# Results of trials, by training mode and the images' shape: `x.view` may work for one shape alone.
_TRIED: WeakKeyDictionary[nn.Module, dict[tuple[bool, torch.Size], bool]] = WeakKeyDictionary()


def convolves(body: nn.Module) -> bool:
    return any(map(_is_convolution, body.modules()))


def for_answers(body: nn.Module, x: Tensor) -> Tensor:
    """Inputs in the memory format in which the module evaluates them fastest."""
    return channels_last(x) if x.device.type == "cpu" and takes_channels_last(body, x) else x


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def takes_channels_last(body: nn.Module, x: Tensor) -> bool:
    """Whether the module has convolutions and runs on channels-last images. One that calls
    `x.view(len(x), -1)` after a convolution does not.

    Tried once for each training mode and shape, with two samples and the first task.
    """
    if x.dim() != 4 or x.device.type not in ("cpu", "cuda"):
        return False
    results, key = _TRIED.setdefault(body, {}), (body.training, x.shape[1:])
    if key not in results:
        if not convolves(body):
            results[key] = False
        elif _runs(body, channels_last(x[:2])):
            results[key] = True
        elif _runs(body, x[:2]):
            results[key] = False
        else:  # it runs on these in no format, which tells nothing: try again next time
            return False
    return results[key]


@torch.no_grad()
def trial(body: nn.Module, x: Tensor, task: int) -> Any:
    """The output of a copy of the module, which may change its own state as it runs."""
    layers = (layer for layer in body.modules() if isinstance(layer, TaskLayer))
    tables = {id(t): t for layer in layers for t in layer.buffers()}  # constant, so not copied
    copy = copy_of(body, tables)
    with active(task), seeds.seeded_rng(x.device, 0):
        return copy(x.clone())


def _runs(body: nn.Module, x: Tensor) -> bool:
    try:
        trial(body, x, 0)
    except Exception:  # a module may raise anything
        return False
    return True


def _is_convolution(layer: nn.Module) -> bool:
    if isinstance(layer, TaskLayer):
        return isinstance(layer.spec, FactoredSpec) and layer.spec.conv is not None
    return isinstance(layer, CONVOLUTIONS)

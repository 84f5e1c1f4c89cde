"""A copy of a network's body that runs for several tasks at once, with their tensors stacked."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from rankup.errors import TaskStateError
from rankup.growing.copying import copy_of
from rankup.layers import TaskHead, TaskLayer, TaskNorm, Tensors, active
from rankup.layers.together import stacked_form

if TYPE_CHECKING:
    from rankup.net.network import IncrementalNet


def begun(net: IncrementalNet) -> Tensors:
    """The values of the network's open task, named `{number of the layer}.{key}`."""
    layers = enumerate(net.layers)
    return {f"{n}.{key}": t.clone() for n, layer in layers for key, t in layer.learned().items()}


def adopt(net: IncrementalNet, values: Tensors) -> None:
    """Set the values of the network's open task to such as `begun` gave."""
    for name, value in values.items():
        number, key = name.split(".")
        net.layers[int(number)].get_parameter(f"new_{key}").data.copy_(value)


class StackedBody:
    """A copy of a network's body that runs for several tasks at once. It shares all constant
    tensors with the network.

    Args:
        net: has begun a task with the same layers as those to run for.
        autocast: the dtype of autocast to run under, if any.
    """

    def __init__(self, net: IncrementalNet, autocast: torch.dtype | None = None) -> None:
        own = {n: layer for n, layer in enumerate(net.layers) if not _is_shared(layer)}
        self.layers = {n: stacked_form(layer) for n, layer in own.items()}
        self.heads = [n for n, layer in own.items() if isinstance(layer, TaskHead)]
        taken: dict[int, object] = {id(layer): self.layers[n] for n, layer in own.items()}
        self.module = copy_of(net.body, {**net._shared.constants(), **taken})
        self.autocast = None if net.dtype == torch.float64 else autocast
        if self.autocast is not None:
            for layer in self.layers.values():
                layer.lower(self.autocast)
        self._net, self._device, self.dtype = net, net.device, net.dtype

    def check_constants(self) -> None:
        """Raise if the module has changed buffers of its own, on which answers depend."""
        copied, given = dict(self.module.named_buffers()), dict(self._net.body.named_buffers())
        for name in self._net._shared.buffer_names:
            if not torch.equal(copied[name], given[name]):
                raise TaskStateError(
                    f"the module changed its {name!r} while it learned, although answers depend "
                    "on it: learn its tasks one after another, with fit"
                )

    def hold(self, tensors: Tensors, missing: Tensors) -> None:
        """From now on run for A tasks with these stacked tensors, `[A, …]`. `missing` is what
        `lacking` gave for them."""
        tasks = len(next(iter(tensors.values())))
        for number, layer in self.layers.items():
            prefix = f"{number}."
            own = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
            if number in self.heads:
                own |= missing
            layer.hold(tasks, own)

    def __call__(self, x: Tensor) -> Tensor:
        with active(torch.zeros(len(x), dtype=torch.long, device=self._device)), self._cast():
            logits: Tensor = self.module(x)
        return logits

    def _cast(self) -> AbstractContextManager[object]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self._device.type, self.autocast)


def stacked(values: Sequence[Tensors]) -> Tensors:
    """The tensors of A tasks stacked, `[A, …]`, and padded with zeros to the largest."""
    together = {}
    for name in values[0]:
        own = [tensors[name] for tensors in values]
        sizes = [max(each) for each in zip(*(tensor.shape for tensor in own), strict=True)]
        together[name] = torch.stack([_padded(tensor, sizes) for tensor in own])
    return together


def cut(tensors: Tensors, like: Tensors) -> Tensors:
    """One task's tensors without padding, in the shapes of `like`."""
    return {name: tensors[name][tuple(map(slice, own.shape))] for name, own in like.items()}


def _padded(tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    gaps = [(0, size - own) for size, own in zip(sizes, tensor.shape, strict=True)]
    return F.pad(tensor, [gap for pair in reversed(gaps) for gap in pair])


def lacking(classes: Sequence[int], widest: int, device: torch.device) -> Tensors:
    """`missing [A, C]`: which of a stacked head's classes each task lacks; empty if none does."""
    if {*classes} == {widest}:
        return {}
    counts = torch.tensor(classes, device=device)[:, None]
    return {"missing": torch.arange(widest, device=device) >= counts}


def _is_shared(layer: TaskLayer) -> bool:
    return isinstance(layer, TaskNorm) and layer.spec.shared

"""Drawing weights anew, by modules' own `reset_parameters`."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rankup import seeds
from rankup.growing.copying import copy_of
from rankup.growing.supported import frozen_parts
from rankup.layers.spec import DenseSpec


def reset(
    module: nn.Module, original: nn.Module, spec: DenseSpec, seed: int, device: torch.device
) -> None:
    """Draw the shared parameters of a network's module anew from the network's seed, where their
    modules can draw them, and reset buffers.

    Args:
        module: the network's module, with task layers.
        original: the module as it was given. Copies of its modules draw, because their code may
            expect layers that were replaced.
    """
    frozen = frozen_parts(original)
    owners = dict.fromkeys(name.rpartition(".")[0] for name, _ in spec.tensors)
    fresh = copy_of(original)
    for name in owners:
        with seeds.seeded_rng(device, seeds.number(seed, "dense", name)):
            redraw(fresh.get_submodule(name))
    with torch.no_grad():
        for name in spec.trained:
            module.get_parameter(name).copy_(fresh.get_parameter(name))
        buffers = dict(fresh.named_buffers(remove_duplicate=False))
        for name in (name for name, _ in spec.tensors if name in buffers):
            if name.rpartition(".")[0] not in frozen:
                # Not copied into: in an expanded one several elements share memory.
                module.get_buffer(name).data = buffers[name].contiguous()


def redrawn(original: nn.Module) -> nn.Module:
    """A copy whose parameters are drawn anew by all modules that can; frozen ones stay as given."""
    fresh, frozen = copy_of(original), frozen_parts(original)
    for name, module in fresh.named_modules():
        if name not in frozen:
            redraw(module)
    with torch.no_grad():
        for drawn, given in zip(fresh.parameters(), original.parameters(), strict=True):
            if not given.requires_grad:
                drawn.copy_(given)
    return fresh


def redraw(module: nn.Module) -> None:
    """Call a module's `reset_parameters`, unless it takes arguments, which only its owner knows."""
    if (draw := drawing_of(module)) is not None and not _wants_arguments(draw):
        draw()


def drawing_of(module: nn.Module) -> Callable[..., Any] | None:
    """The method that draws a module's weights, if it has one; `nn.MultiheadAttention` has another
    name for it than torch's other layers."""
    names = ("reset_parameters", "_reset_parameters")
    methods = (getattr(module, name, None) for name in names)
    return next((method for method in methods if callable(method)), None)


def _wants_arguments(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # written in C, with no signature
        pass
    return False

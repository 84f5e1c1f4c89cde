"""Redrawing weights, by the modules that know how to draw them."""

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
    body: nn.Module, given: nn.Module, spec: DenseSpec, seed: int, device: torch.device
) -> None:
    """Draw new values from the network's seed, in the modules that know how to, and reset their
    buffers.

    Args:
        given: the module as it was given: its own code may also draw its layers, which the body no
            longer has.
    """
    frozen = frozen_parts(given)
    owners = dict.fromkeys(name.rpartition(".")[0] for name, _ in spec.tensors)
    fresh = copy_of(given) if owners else given
    for name in owners:
        with seeds.drawing(device, seeds.number(seed, "dense", name)):
            redraw(fresh.get_submodule(name))
    with torch.no_grad():
        for name in spec.trained:
            body.get_parameter(name).copy_(fresh.get_parameter(name))
        drawn = dict(fresh.named_buffers(remove_duplicate=False))
        for name in (name for name, _ in spec.tensors if name in drawn):
            if name.rpartition(".")[0] not in frozen:
                # Not copied into: in an expanded one several elements share memory.
                body.get_buffer(name).data = drawn[name].contiguous()


def redrawn(given: nn.Module) -> nn.Module:
    """A copy with redrawn weights, including by modules that draw those of their layers; frozen
    parameters stay as given."""
    fresh, frozen = copy_of(given), frozen_parts(given)
    for name, module in fresh.named_modules():
        if name not in frozen:
            redraw(module)
    with torch.no_grad():
        for drawn, own in zip(fresh.parameters(), given.parameters(), strict=True):
            if not own.requires_grad:
                drawn.copy_(own)
    return fresh


def redraw(module: nn.Module) -> None:
    """Redraw a module's own weights, if it knows how to. Torch's attention has another name for
    that than all its other layers."""
    if (draw := drawing_of(module)) is not None and not _wants_arguments(draw):
        draw()  # one with arguments is for its owner to call


def drawing_of(module: nn.Module) -> Callable[..., Any] | None:
    """The method that draws a module's own weights, if any."""
    names = ("reset_parameters", "_reset_parameters")
    found = (getattr(module, name, None) for name in names)
    return next((draw for draw in found if callable(draw)), None)


def _wants_arguments(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # written in C, with no signature
        pass
    return False

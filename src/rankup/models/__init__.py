"""Models of the paper as plain modules. A network folder holds what is needed to rebuild
them; any other module must be passed to `rankup.load`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rankup.models.mlp import MLP, mlp
from rankup.models.resnet import ResNet18, resnet18

__all__ = ["MLP", "ResNet18", "mlp", "resnet18"]

_BUILT_IN: dict[str, tuple[type[nn.Module], Callable[..., nn.Module]]] = {
    "mlp": (MLP, mlp),
    "resnet18": (ResNet18, resnet18),
}


def describe(module: nn.Module) -> dict[str, Any]:
    """Describe a module as plain data: how to build it if it is ours, otherwise its class."""
    for name, (kind, _) in _BUILT_IN.items():
        if type(module) is kind:
            return {"model": name, "options": module.options}
    return {"model": None, "class": type(module).__qualname__}


def parameter_count(description: dict[str, Any]) -> int:
    """How many numbers `build` would draw; none for a module that is not ours."""
    if description["model"] is None:
        return 0
    try:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in build(description).parameters())
    except RuntimeError as error:
        raise ValueError(f"its model cannot be built: {error}") from None


def build(description: dict[str, Any]) -> nn.Module:
    """The inverse of `describe` for our own models."""
    _, make = _BUILT_IN[description["model"]]
    return make(**description["options"])

"""Models: the paper's, those of timm by name, and those of transformers from a folder or the Hub.

A network's folder describes how to rebuild them; any other module must be passed to `rankup.load`.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from rankup.data.inputs import Input
from rankup.errors import RankupError
from rankup.models import from_hf, from_timm
from rankup.models.mlp import MLP, mlp
from rankup.models.packages import version_of
from rankup.models.resnet import ResNet18, resnet18

__all__ = ["MLP", "ResNet18", "hf", "inputs_of", "mlp", "resnet18", "timm"]

_BUILT_IN: dict[str, tuple[type[nn.Module], Callable[..., nn.Module]]] = {
    "mlp": (MLP, mlp),
    "resnet18": (ResNet18, resnet18),
}
_MOST_MODULES = 20_000  # the largest published models have some thousands
_PACKAGES = {"timm": "timm", "hf": "transformers"}  # of models that are not ours


def timm(
    name: str,
    *,
    pretrained: bool = False,
    num_classes: int = 10,
    in_chans: int = 3,
    img_size: int | None = None,
) -> nn.Module:
    """Make a model of timm. `rankup.load` rebuilds it without being given a module.

    Args:
        name: one of timm's names, with a tag or without one: `resnet18`, `resnet18.a1_in1k`.
        pretrained: whether to load its published weights, which timm downloads.
        num_classes: outputs of its head, which a grown network replaces by a head for each task.
        in_chans: channels of its images.
        img_size: height and width of its images, for models that are made for one size.
    """
    for what, value in (
        ("num_classes", num_classes),
        ("in_chans", in_chans),
        ("img_size", img_size),
    ):
        if value is not None and (type(value) is not int or not 1 <= value <= 2**20):
            raise RankupError(f"{what} must be a whole number of at least 1, got {value!r}")
    module = from_timm.make(name, in_chans, img_size, num_classes, pretrained)
    options = {"name": name, "in_chans": in_chans, "img_size": img_size}
    about: dict[str, Any] = getattr(module, "pretrained_cfg", {})
    inputs = from_timm.inputs_of(about, in_chans, img_size)
    return _named(module, _description("timm", options), inputs)


def hf(name_or_path: str | os.PathLike[str], *, pretrained: bool = True) -> nn.Module:
    """Make a model of transformers that is called with one tensor, token ids `[B, L]` or images
    `[B, C, H, W]`, and returns logits. `rankup.load` rebuilds it without being given a module.

    Args:
        name_or_path: a folder, or a name on the Hugging Face Hub. Weights are read from
            safetensors files alone, and no code that comes with a model is run.
        pretrained: whether to load its weights; otherwise they are random.
    """
    options = from_hf.read_options(name_or_path)
    module = from_hf.make(options, name_or_path if pretrained else None)
    inputs = from_hf.inputs_of(name_or_path, options)
    return _named(module, _description("hf", options), inputs)


def inputs_of(module: nn.Module) -> Input | None:
    """The inputs of a model made by `timm` or `hf`: size and scaling of its images, or its
    tokenizer. None for other modules, and for models that `rankup.load` has rebuilt."""
    return getattr(module, "rankup_inputs", None)


def published_inputs(net: str) -> Input:
    """The inputs of the model `timm:NAME` or `hf:NAME`, without loading its weights."""
    kind, _, name = net.partition(":")
    if kind == "timm":
        return from_timm.trained_with(name)
    return from_hf.inputs_of(name, from_hf.read_options(name))


def describe(module: nn.Module) -> dict[str, Any]:
    """Describe a module as plain data: how to build it if that is known, otherwise its class."""
    described: dict[str, Any] | None = getattr(module, "rankup_model", None)
    if described is not None:
        return described
    for name, (kind, _) in _BUILT_IN.items():
        if type(module) is kind:
            return {"model": name, "options": module.options}
    return {"model": None, "class": type(module).__qualname__}


def build(description: dict[str, Any]) -> nn.Module:
    """The inverse of `describe`, for models that can be built. Weights are random, and nothing is
    downloaded."""
    name, options = description["model"], description.get("options", {})
    if name in _BUILT_IN:
        return _BUILT_IN[name][1](**options)
    try:
        module = from_timm.make(**options) if name == "timm" else from_hf.make(options)
    except RankupError as error:
        raise RankupError(f"{error}{version_note(description)}") from error
    return _named(module, description, None)


def parameter_count(description: dict[str, Any]) -> int:
    """The number of parameters that `build` would draw; 0 for a module that cannot be built."""
    return _counted(json.dumps(description)) if can_build(description) else 0


def can_build(description: dict[str, Any]) -> bool:
    """Whether a description tells how to build the model, and its package is installed."""
    package = _PACKAGES.get(description["model"])
    return description["model"] is not None and (package is None or version_of(package) is not None)


def are_alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two descriptions are of the same model, whatever the versions of its package."""
    return {**one, "version": None} == {**other, "version": None}


def version_note(description: dict[str, Any]) -> str:
    """The end of a sentence, for a model that was saved with another version of its package than
    the one installed; empty otherwise."""
    package = _PACKAGES.get(description["model"])
    if package is None or (now := version_of(package)) in (None, description["version"]):
        return ""
    return f"; it was saved with {package} {description['version']}, and this is {package} {now}"


@lru_cache(maxsize=64)  # needed by every save, which reads the folder's manifest
def _counted(description: str) -> int:
    try:
        with torch.device("meta"), _few_modules():
            return sum(each.numel() for each in build(json.loads(description)).parameters())
    except RuntimeError as error:
        raise ValueError(f"its model cannot be built: {error}") from None


@contextmanager
def _few_modules() -> Iterator[None]:
    """Inside, building more than `_MOST_MODULES` modules raises `ValueError`: a description from a
    stranger may have a billion layers, which would take forever even without weights."""
    here, count = threading.get_ident(), 0

    def counted(*_: Any) -> None:
        nonlocal count
        count += threading.get_ident() == here
        if count > _MOST_MODULES:
            raise ValueError(f"its model has more than {_MOST_MODULES:,} modules")

    hook = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        hook.remove()


def _description(model: str, options: dict[str, Any]) -> dict[str, Any]:
    return {"model": model, "version": version_of(_PACKAGES[model]), "options": options}


def _named(module: nn.Module, description: dict[str, Any], inputs: Input | None) -> nn.Module:
    # As attributes, because copies of the module keep them.
    module.rankup_model = description  # type: ignore[assignment]
    module.rankup_inputs = inputs  # type: ignore[assignment]
    return module

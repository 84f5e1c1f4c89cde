"""The networks that `--net` names: how their inputs are prepared, and their modules."""

from dataclasses import replace

from torch import nn

from rankup import models
from rankup.data.inputs import ImageInput, Input, TextInput
from rankup.data.tasks import Task
from rankup.runs.folder import RunConfig, RunError
from rankup.runs.request import is_published


def wanted_inputs(net: str, pretrained: bool) -> Input | None:
    """How inputs of a published network must be prepared: by its tokenizer, or as the images that
    its weights were trained with. None for other networks."""
    if not is_published(net):
        return None
    inputs = models.published_inputs(net)
    return inputs if pretrained or isinstance(inputs, TextInput) else None


def as_made(inputs: Input | None, task: Task) -> Input | None:
    """How the samples of a stream's tasks were prepared: `inputs` with the length of their texts or
    the size of their images."""
    shape = task.train_x.shape[1:]
    if isinstance(inputs, TextInput):
        return replace(inputs, length=shape[0])
    if isinstance(inputs, ImageInput) and len(shape) == 3:
        size, channels = max(shape[1:]), shape[0]
        return ImageInput(size, 1 if channels == 1 else 3, mean=inputs.mean, std=inputs.std)
    return None


def make_module(config: RunConfig, task: Task) -> nn.Module:
    """The module for inputs like those of a task."""
    shape = task.train_x.shape[1:]
    if config.net == "mlp":
        return models.mlp(shape.numel(), hidden=[config.width, config.width])
    kind, _, name = config.net.partition(":")
    if kind == "hf":
        return models.hf(name, pretrained=config.pretrained)
    if len(shape) != 3:
        raise RunError(f"{config.net} takes images, got inputs of shape {list(shape)}")
    if kind == "timm":
        return models.timm(
            name, pretrained=config.pretrained, in_chans=shape[0], img_size=shape[-1]
        )
    return models.resnet18(config.width, image_size=shape[-1], channels=shape[0])

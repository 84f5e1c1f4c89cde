"""ResNet18 of any width, with a stem for small images: no pooling before the first block."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from rankup.errors import RankupError


class Block(nn.Module):
    """Two 3×3 convolutions and a shortcut, from `[B, channels, H, W]` to
    `[B, outputs, H / stride, W / stride]`."""

    def __init__(self, channels: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """A stem, four stages of two blocks each, mean pooling and a linear `head`."""

    def __init__(self, width: int, image_size: int, channels: int, classes: int) -> None:
        super().__init__()
        self.options = {"width": width, "image_size": image_size, "channels": channels}
        stride = 1 if image_size < 64 else 2
        self.stem = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.blocks = nn.Sequential()
        for stage, (before, after) in enumerate(pairwise(widths)):
            self.blocks.append(Block(before, after, 1 if stage == 0 else 2))
            self.blocks.append(Block(after, after, 1))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        logits: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return logits


def resnet18(
    width: int = 20, image_size: int = 32, channels: int = 3, classes: int = 10
) -> ResNet18:
    """Make a ResNet18 with `width` channels in its first stage (usually 64). Images of at least 64
    pixels get a stem of stride 2, so that 84×84 costs about what 42×42 would.

    >>> resnet18(width=4, image_size=84)(torch.zeros(2, 3, 84, 84)).shape
    torch.Size([2, 10])
    """
    sizes = {"width": width, "image_size": image_size, "channels": channels, "classes": classes}
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise RankupError(
                f"resnet18 takes a whole number of at least 1 as {name}, got {size!r}"
            )
    return ResNet18(width, image_size, channels, classes)

"""Making new networks by name, with the preparation of their inputs."""

from dataclasses import replace

from rankup import models
from rankup.data.inputs import ImageInput
from rankup.errors import RankupError
from rankup.net.grow import grow
from rankup.net.network import IncrementalNet
from rankup.rank import parse_rank
from rankup.runs.request import PUBLISHED_RANK, RANKS, WIDTHS, check_net, is_published

DEFAULT = "resnet18"
SIZE = 64  # width and height in pixels of the images of mlp and resnet18


def new_network(
    net: str = DEFAULT,
    *,
    pretrained: bool = False,
    size: int | None = None,
    width: int | None = None,
    rank: str | None = None,
    prune: bool = False,
    seed: int = 0,
) -> IncrementalNet:
    """Make a network that has learned no task yet.

    Args:
        net: mlp, resnet18, timm:NAME or hf:NAME_OR_PATH.
        pretrained: whether to keep the weights that come with a published network.
        size: the width and height of its images in pixels; by default 64, or what a published
            network was made for.
        width: the width of mlp and resnet18, as for `rankup run`.
        rank: the ranks that the first and each later task add, such as 8,2 or 0.1,0.02.
        prune: whether a task drops the factors that it can do without.
        seed: the seed of all its randomness.
    """
    check_net(net)
    if pretrained and not is_published(net):
        raise RankupError(f"--pretrained is for published networks, such as timm:NAME, not {net}")
    if width is not None and is_published(net):
        raise RankupError(f"--width is for mlp and resnet18: {net} has its own")
    rule = replace(parse_rank(rank or RANKS.get(net, PUBLISHED_RANK), None), prune=prune)
    inputs = ImageInput(SIZE if size is None else size)
    kind, _, name = net.partition(":")
    if kind == "hf":
        if size is not None:
            raise RankupError(f"--size is for networks of images by name: {net} has its own")
        module = models.hf(name, pretrained=pretrained)
    elif kind == "timm":
        module = models.timm(name, pretrained=pretrained, img_size=size)
    elif net == "mlp":
        each = width or WIDTHS[net]
        module = models.mlp(3 * inputs.size**2, hidden=[each, each])
    else:
        module = models.resnet18(width or WIDTHS[net], image_size=inputs.size)
    made = grow(module, rule, base="keep" if pretrained else "new", seed=seed)
    made.inputs = models.inputs_of(module) if is_published(net) else inputs
    return made

"""Requests to the commands that learn, independent of the command line."""

import hashlib
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from rankup.errors import RankupError
from rankup.methods.settings import base_recipe
from rankup.runs.ray_pool import check_address
from rankup.training.recipe import recipe_for

_LONGEST = 100  # bytes of a stream's name in a folder's name, which may have 255


NETS = ("mlp", "resnet18")  # ours; all others are published ones
PUBLISHED = {"timm:": "NAME", "hf:": "NAME_OR_PATH"}

# Defaults for networks; published ones have a width of their own.
WIDTHS = {"mlp": 256, "resnet18": 20}
RANKS = {"mlp": "11,1", "resnet18": "0.1,0.02"}
PUBLISHED_RANK = "4,1"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass(frozen=True)
class Request:
    """The options that all commands which learn have in common."""

    stream: str = "p-digits"
    net: str = "mlp"
    pretrained: bool = False
    width: int | None = None
    rank: str | None = None
    seeded: str | None = None
    tasks: int | None = None
    per_class: int | None = None
    recipe: str = "default"
    seed: int = 0
    seeds: int = 1  # how many, from `seed` on
    data: Path | None = None
    download: bool = False
    resume: bool = False
    device: Device = Device.auto
    threads: int | None = None
    on: str | None = None  # a Ray cluster; None: this machine
    recipe_options: dict[str, Any] = field(default_factory=dict)  # fields of a recipe
    untold: bool = False  # also test without telling the task
    held_out: float = 0.0  # share of the training data used as test data
    first: int | None = None  # how many of the stream's tasks to learn, if not all
    is_complete: bool = False  # `recipe_options` has all fields, and `recipe` is just a name

    def __post_init__(self) -> None:
        # Before any data are loaded.
        check_net(self.net)
        if self.pretrained and not is_published(self.net):
            raise RankupError(f"--pretrained is for --net {_published()}, not for {self.net}")
        if self.width and is_published(self.net):
            raise RankupError(f"--width is for --net {' and '.join(NETS)}, {self.net} has its own")
        check_address(self.on)
        replace(recipe_for(self.base_recipe), **self.recipe_options)

    def folder(self, command: str) -> Path:
        """The default folder of a command with several runs."""
        net = "" if self.net == "mlp" else f"-{as_part_of_a_name(self.net)}"
        return Path("runs") / f"{command}-{self.stream_name}{net}"

    @property
    def base_recipe(self) -> str:
        """The recipe that everything else overrides."""
        return "default" if self.is_complete else base_recipe(self.recipe)

    @property
    def all_seeds(self) -> range:
        return range(self.seed, self.seed + self.seeds)

    @property
    def stream_name(self) -> str:
        """The stream's name as part of a folder's name. A long path is shortened to its last part
        and a hash.

        >>> Request(stream="split:photos/birds").stream_name
        'split-photos_birds'
        >>> Request(stream=f"split:{'photos/' * 20}birds").stream_name
        'split-birds-01f42509'
        """
        return as_part_of_a_name(self.stream)


def check_net(net: str) -> None:
    """Raise `RankupError` for anything but a network's name."""
    if net not in NETS and not is_published(net):
        raise RankupError(f"net must be one of {', '.join(NETS)}, {_published(', ')}, got {net!r}")


def is_published(net: str) -> bool:
    """Whether a name is that of a published network, which may come with weights."""
    return isinstance(net, str) and any(net.startswith(kind) and net != kind for kind in PUBLISHED)


def as_part_of_a_name(name: str) -> str:
    """The name of a stream or network as part of a folder's name. Most of a long path becomes a
    hash."""
    kind, colon, path = name.partition(":")
    encoded = name.encode(errors="replace")
    if len(encoded) > _LONGEST:
        last = Path(path or kind).name[: _LONGEST // 2]
        name = f"{kind}{colon}{last}-{hashlib.sha256(encoded).hexdigest()[:8]}"
    return name.replace("/", "_").replace(":", "-")


def _published(between: str = " or ") -> str:
    return between.join(f"{kind}{what}" for kind, what in PUBLISHED.items())

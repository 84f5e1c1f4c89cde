"""Modules and networks that the tests grow, and ways to teach them."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankup
from rankup.rank import Rank

GPU = pytest.mark.gpu  # skipped where there is none: see conftest.py


class Attention(nn.Module):
    """Self-attention written with Linear layers, over `[B, T, D]`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v))


class Transformer(nn.Module):
    """One block, with layer norms before each part and the mean over the sequence for the head."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.head(x.mean(1))


class HeadFirst(nn.Module):
    """The head is the first attribute, one layer runs twice and has a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.into = nn.Linear(5, 6)
        self.again = nn.Linear(6, 6)
        self.same = self.again

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.into(x))
        return self.head(torch.tanh(self.same(torch.tanh(self.again(x)))))


def convolutions() -> nn.Module:
    """Strided, dilated, 1×1 and padded in every way, with and without bias, every norm."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, padding_mode="reflect"),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 1, bias=False),
        nn.GroupNorm(2, 6),
        nn.ReLU(),
        nn.Conv2d(6, 6, (3, 1), padding="same", padding_mode="circular", dilation=(2, 1)),
        nn.Tanh(),
        nn.Conv2d(6, 5, 3, padding=(1, 0), bias=False),
        nn.BatchNorm2d(5),
        nn.Flatten(),
        nn.LazyLinear(7),
        nn.BatchNorm1d(7),
        nn.Linear(7, 3),
    )


def dimensions() -> nn.Module:
    """Over one dimension and over three, each with its norm, and an RMS norm."""
    return nn.Sequential(
        nn.Conv1d(3, 8, 5, stride=2, padding=2, padding_mode="circular"),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Conv1d(8, 6, 1, bias=False),
        nn.ReLU(),
        nn.Conv1d(6, 6, 3, padding="same", dilation=2),
        nn.Unflatten(2, (2, 2, 2)),
        nn.Conv3d(6, 5, (1, 2, 2), stride=(1, 2, 1), padding=(0, 1, 0), bias=False),
        nn.BatchNorm3d(5),
        nn.Flatten(),
        nn.LazyLinear(7),
        nn.RMSNorm(7),
        nn.Linear(7, 3),
    )


def inputs(kind: str, batch: int = 6, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    shape = {
        "mlp": (9,),
        "resnet18": (3, 16, 16),
        "transformer": (4, 12),
        "convolutions": (3, 9, 9),
        "dimensions": (3, 16),
        "head_first": (5,),
    }[kind]
    drawn = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(dtype)


def module(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    made = {
        "mlp": lambda: rankup.models.mlp(9, hidden=[8, 7]),
        "resnet18": lambda: rankup.models.resnet18(width=4, image_size=16),
        "transformer": Transformer,
        "convolutions": convolutions,
        "dimensions": dimensions,
        "head_first": HeadFirst,
    }[kind]()
    made = made.to(dtype)
    made.eval()(inputs(kind, dtype=dtype))  # lets lazy layers see their shape
    return made


RANKS = {
    "learned": Rank(first=2, step=1),
    "with seeded": Rank(first=1, step=1, seeded=12),
    "seeded only": Rank(first=0, step=0, seeded="4x"),
}

KINDS = ["mlp", "resnet18", "transformer", "convolutions", "dimensions", "head_first"]


def teach(
    net: rankup.IncrementalNet,
    name: str,
    x: Tensor,
    classes: int = 3,
    steps: int = 3,
    commit: bool = True,
    **start: object,
) -> None:
    """Learn random labels: enough for every parameter to move."""
    net.begin_task(name, classes, **start)
    labels = torch.randint(classes, (len(x),), generator=torch.Generator().manual_seed(len(name)))
    optimiser = torch.optim.Adam(net.parameters(), lr=0.05, weight_decay=0.01)
    for _ in range(steps):
        optimiser.zero_grad()
        F.cross_entropy(net(x, task=name), labels.to(x.device)).backward()
        optimiser.step()
    if commit:
        net.commit_task(calibrate=[x])


def taught(
    kind: str, tasks: Iterable[int] = (3, 2, 4), rank: rankup.Rank | None = None, **grow: object
) -> rankup.IncrementalNet:
    """A network of a kind that has learned a task for each number of classes given."""
    dtype = grow.pop("dtype", torch.float32)
    net = rankup.grow(module(kind, dtype), rank or rankup.Rank(first=2, step=1), **grow)
    for index, classes in enumerate(tasks):
        teach(net, f"task {index}", inputs(kind, seed=index, dtype=dtype), classes)
    return net.eval()


def logits(net: rankup.IncrementalNet, x: Tensor) -> list[Tensor]:
    """What every committed task answers, on the one-task path."""
    with torch.no_grad():
        return [net(x, task=name) for name in net.tasks]


def assert_same_bits(before: list[Tensor], after: list[Tensor]) -> None:
    assert len(before) <= len(after)
    for task, (old, new) in enumerate(zip(before, after, strict=False)):
        assert torch.equal(old, new), f"task {task} moved by {(old - new).abs().max()}"


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The error relative to the expected size, or to 1 if that is zero."""
    found, expected = found.detach(), expected.detach()
    return float((found - expected).norm() / (expected.norm() or 1))


def blobs(seed: int, size: int, classes: int = 3, samples: int = 60) -> rankup.Task:
    """A task that is quickly learned: each class is noise around a centre of its own."""
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, size, generator=draw)
    y = torch.arange(samples) % classes
    x = centres[y] + 0.3 * torch.randn(samples, size, generator=draw)
    return rankup.Task(f"{seed}", classes, x, y, x[:9], y[:9])


def hashes(folder: Path) -> dict[str, str]:
    """Every file that belongs to the network, with its hash."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }

"""A task's data on its device, and its batches as a recipe wants them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rankup import kernels, seeds
from rankup.data.transforms import (
    Augmentation,
    Permutation,
    augment,
    check_pad,
    draw_augmentation,
    to_float,
)
from rankup.errors import RankupError
from rankup.training.recipe import Recipe

if TYPE_CHECKING:
    from rankup.data.tasks import Task

Draws = dict[str, Tensor]

CALIBRATION = 10_000  # training samples behind a task's statistics
_CHUNK = 2048  # samples in a batch that is not learned from
_CHUNK_BYTES = 2**26  # of such a batch on a GPU, which wants larger ones


class Feed:
    """A task's data in batches, scaled and augmented as a recipe says, to learn from and to test
    with.

    All randomness of an epoch is drawn at once, as tensors with an entry for each step: a
    batch is then a pure function of the data and those entries, on any device.
    """

    def __init__(
        self,
        task: Task,
        recipe: Recipe,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if recipe.augments and task.train_x.dim() != 4:
            raise RankupError(
                f"flip and crop are for images of shape [N, C, H, W], but task {task.name!r} has "
                f"training inputs of shape {list(task.train_x.shape)}"
            )
        self.task = task if task.train_x.device == device else task.to(device)
        self.recipe = recipe
        self.device = device
        self.dtype = dtype  # of the inputs
        self.batch_size = min(recipe.batch, len(self))
        self.steps_per_epoch = math.ceil(len(self) / self.batch_size)
        self.channels_last = False  # the memory layout of images that the learner prefers

    def __len__(self) -> int:
        return len(self.task.train_y)

    @cached_property
    @torch.no_grad()
    def made(self) -> Tensor | None:
        """Training data that is the same in every epoch, ready but for its scale. Bytes stay bytes
        where that loses nothing: gathering a quarter of the memory takes half the time."""
        x, transform = self.task.train_x, self.task.transform
        if self.recipe.augments:
            return None
        if transform is None:
            return x
        if isinstance(transform, Permutation):
            return transform(x)
        parts = torch.split(x, self.chunk(x))
        # Copies, because a transform may change its input.
        return torch.cat([transform(self.floats(part.clone())) for part in parts])

    @property
    def transforms_batches(self) -> bool:
        """Whether every batch goes through the task's own transform, which then is a part of the
        step."""
        return self.made is None and self.task.transform is not None

    @property
    def x(self) -> Tensor:
        """What batches are gathered from."""
        return self.task.train_x if self.made is None else self.made

    @property
    def parts(self) -> Sequence[Feed]:
        """The feeds of the tasks that are learned at once: just this one."""
        return [self]

    def guess(self) -> float:
        """Accuracy of the best guess: the share of the most frequent class."""
        return float(self.task.train_y.bincount().max()) / len(self)

    def sample_epoch(self, generator: torch.Generator) -> Draws:
        """An epoch's random draws: the rows of each batch, `[steps, batch]`, and those of its
        augmentation.

        All batches are of the same size: the last one is filled up from the epoch's first rows. A
        handful of samples would make a poor step, and for batch norms a wild one.
        """
        order = torch.randperm(len(self), generator=generator, device=generator.device)
        missing = self.steps_per_epoch * self.batch_size - len(self)
        rows = torch.cat([order, order[:missing]]).view(self.steps_per_epoch, self.batch_size)
        if not self.recipe.augments:
            return {"rows": rows}
        coins, offsets = self.augmentation(rows.shape, generator)
        return {"rows": rows, "coins": coins, "offsets": offsets}

    def augmentation(self, shape: Sequence[int], generator: torch.Generator) -> Augmentation:
        """Random draws for the augmentation of that many samples."""
        coins, offsets = draw_augmentation(math.prod(shape), self.recipe.crop, generator)
        coins = coins if self.recipe.flip else torch.zeros_like(coins)
        return Augmentation(coins.view(*shape), offsets.view(*shape, 2))

    def batch(self, x: Tensor, draw: Draws, at: Tensor | None = None) -> Tensor:
        """Inputs of one step from `x`, augmented if the recipe says so. `at` are the `flat_rows`,
        if they are known already."""
        if "coins" in draw and self._has_kernel(x):
            at = flat_rows(draw["rows"], x.shape[1]) if at is None else at
            return self._by_kernel(x, draw, at)
        picked = take(x, draw["rows"]) if at is None else take_flat(x, at)
        if "coins" not in draw:
            return self.scaled(self.floats(picked))
        drawn = Augmentation(draw["coins"].flatten(), draw["offsets"].flatten(0, -2))
        # On bytes, if they are bytes: faster.
        changed = self.floats(augment(picked.view(-1, *x.shape[-3:]), self.recipe.crop, drawn))
        if self.task.transform is not None:
            changed = self.task.transform(changed)
        return self.scaled(changed.view(*picked.shape[:-3], *changed.shape[1:]))

    def _has_kernel(self, x: Tensor) -> bool:
        return (
            x.is_cuda
            and x.dtype == torch.uint8
            and x.is_contiguous()
            and self.dtype == torch.float32
            and self.task.transform is None
            and not torch._C._are_functorch_transforms_active()
            and kernels.is_available()
        )

    def _by_kernel(self, x: Tensor, draw: Draws, at: Tensor) -> Tensor:
        from rankup.kernels.augment import augmented

        check_pad(self.recipe.crop, x.shape)
        made = augmented(
            x.view(-1, *x.shape[-3:]),
            at.flatten(),
            draw["coins"].flatten(),
            draw["offsets"].flatten(0, -2),
            self.recipe.crop,
            self.recipe.pixels,
            self.channels_last and at.dim() == 1,
        )
        return made if at.dim() == 1 else made.view(*at.shape, *x.shape[-3:])

    def train(self, most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Training data as it is, in chunks: at most `most` samples, the same ones every time.
        They are drawn at random, because classes may come one after another or take turns."""
        x, y = self.x, self.task.train_y
        if len(self) > most:
            own = seeds.generator(0, "looked at")
            order = torch.randperm(len(self), generator=own, device=own.device)
            rows = order[:most].sort().values.to(self.device)
            x, y = x.index_select(0, rows), y.index_select(0, rows)
        chunks = self._split(x, y)
        if self.made is None:
            return ((self._inputs(x), y) for x, y in chunks)
        return ((self.scaled(self.floats(x)), y) for x, y in chunks)

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        chunks = self._split(self.task.test_x, self.task.test_y)
        return ((self._inputs(x), y) for x, y in chunks)

    def sample(self, most: int, draw: torch.Generator) -> Iterator[Tensor]:
        """Batches of shuffled training inputs, not augmented."""
        rows = torch.randperm(len(self), generator=draw, device=draw.device)[:most].to(self.device)
        for part in in_equal_parts(rows, self.chunk(self.task.train_x)):
            yield self._inputs(self.task.train_x.index_select(0, part))

    @property
    def byte_scale(self) -> float | None:
        """What to multiply the bytes of `made` by, if they are bytes and need nothing else. This
        may be done later, to a result of theirs that has fewer numbers."""
        if self.made is None or self.made.dtype != torch.uint8 or self.recipe.pixels == "centred":
            return None
        return 1 / 255 if self.recipe.pixels == "unit" else 1.0

    def floats(self, x: Tensor) -> Tensor:
        return as_floats(x, self.dtype)

    def scaled(self, x: Tensor) -> Tensor:
        return as_inputs(x, self.recipe, self.dtype)

    def _split(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        size = self.chunk(x)
        # Copies, because a module may change its input; bytes are converted anyway.
        parts = (x if x.dtype == torch.uint8 else x.clone() for x in in_equal_parts(x, size))
        return zip(parts, in_equal_parts(y, size), strict=True)

    def _inputs(self, x: Tensor) -> Tensor:
        transform = self.task.transform
        if isinstance(transform, Permutation):  # on bytes, if they are bytes: faster
            return self.scaled(self.floats(transform(x)))
        x = self.floats(x)
        return self.scaled(x if transform is None else transform(x))

    def chunk(self, x: Tensor) -> int:
        """How many samples like these to evaluate together."""
        if self.device.type == "cpu":
            return _CHUNK
        return max(256, _CHUNK_BYTES // (4 * x[0].numel()))


def in_equal_parts(x: Tensor, most: int) -> Sequence[Tensor]:
    """Equal parts of at most `most` rows, so that none is small: a norm takes statistics of each.

    >>> [len(part) for part in in_equal_parts(torch.zeros(2049), 2048)]
    [1025, 1024]
    """
    return torch.tensor_split(x, math.ceil(len(x) / most))


def as_floats(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Inputs before they are scaled: in the network's precision, but at least float32, which
    transforms need."""
    return to_float(x, torch.promote_types(dtype, torch.float32))


def as_inputs(x: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """Inputs for a network in that dtype; indices are left alone. Whatever produced them, such as a
    backbone whose outputs are the data, does not learn."""
    return scaled(x.detach().to(dtype), recipe) if x.is_floating_point() else x


def scaled(x: Tensor, recipe: Recipe) -> Tensor:
    """Pixels from 0 to 1 as a recipe wants them."""
    if recipe.pixels == "raw":
        return x * 255
    return x * 2 - 1 if recipe.pixels == "centred" else x


def take(table: Tensor, rows: Tensor) -> Tensor:
    """`table[rows]`; with a leading dimension of replicas, each one's rows of its own table.

    >>> take(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 1], [0, 1]]))
    tensor([[2, 2],
            [3, 4]])
    """
    if rows.dim() == 1:
        return table.index_select(0, rows)
    return take_flat(table, flat_rows(rows, table.shape[1]))


def flat_rows(rows: Tensor, length: int) -> Tensor:
    """Indices of replicas' rows in their tables of that length, concatenated."""
    return rows + _starts(len(rows), length, rows.device) if rows.dim() > 1 else rows


def take_flat(table: Tensor, rows: Tensor) -> Tensor:
    if rows.dim() == 1:
        return table.index_select(0, rows)
    taken = table.flatten(0, 1).index_select(0, rows.flatten())
    return taken.view(*rows.shape, *table.shape[2:])


@cache
def _starts(replicas: int, length: int, device: torch.device) -> Tensor:
    return torch.arange(replicas, device=device)[:, None] * length

"""Batches of a task's data, made on the device and scaled and augmented by a recipe."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rankup import kernels, seeds
from rankup.data.transforms import (
    TURNS,
    Augmentation,
    Permutation,
    Rotation,
    all_turns,
    augment,
    check_pad,
    check_square,
    draw_augmentation,
    to_float,
    turn,
)
from rankup.distributed.ranks import Ranks
from rankup.errors import DataError, RankupError
from rankup.training.recipe import Recipe

if TYPE_CHECKING:
    from rankup.data.tasks import Task

# The random numbers of a step, or of all steps of an epoch: rows of the batch, and augmentation.
Draws = dict[str, Tensor]

CALIBRATION = 10_000  # training samples behind a task's statistics
_CHUNK = 2048  # samples that are evaluated together
_CHUNK_BYTES = 2**26  # of inputs in float32 that are evaluated together on a GPU


class Feed:
    """A task's data in batches, for training and for testing.

    All random numbers of an epoch are drawn at once, as tensors with an entry for each step. A
    batch is then a pure function of the data and one entry, on any device. The processes of a group
    all draw the same numbers, and each takes its part of every batch.

    With rotations an epoch goes through all samples in all four turns. Images are turned when a
    batch is made, so the data is in memory once.

    Args:
        dtype: of the inputs.
        ranks: the processes that share every batch, if there are several.

    Attributes:
        batch_size: how many samples of each batch this process takes.
        channels_last: whether the learner wants images in channels-last format.
    """

    def __init__(
        self,
        task: Task,
        recipe: Recipe,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        ranks: Ranks | None = None,
    ) -> None:
        if recipe.augments and task.train_x.dim() != 4:
            raise RankupError(
                f"flip and crop are for images of shape [N, C, H, W], but task {task.name!r} has "
                f"training inputs of shape {list(task.train_x.shape)}"
            )
        if recipe.rotations and (reason := why_unturnable(task)):
            raise RankupError(reason)
        self.turns = TURNS if recipe.rotations else 1
        self.task = task if task.train_x.device == device else task.to(device)
        self.recipe = recipe
        self.device = device
        self.dtype = dtype
        self._drawn = min(recipe.batch, self.turns * len(self))
        self.steps_per_epoch = math.ceil(self.turns * len(self) / self._drawn)
        self.ranks = ranks
        self._mine = ranks.part(self._drawn) if ranks else slice(0, self._drawn)
        self.batch_size = self._mine.stop - self._mine.start
        self.channels_last = False

    def __len__(self) -> int:
        return len(self.task.train_y)

    @cached_property
    @torch.no_grad()
    def fixed(self) -> Tensor | None:
        """The transformed but unscaled training inputs, if they are the same in every epoch. Bytes
        stay bytes if possible: a batch of a quarter of the memory is gathered in half the time."""
        x, transform = self.task.train_x, self.task.transform
        if self.recipe.augments or self.recipe.rotations:
            return None
        if transform is None:
            return x
        if isinstance(transform, Permutation):
            return transform(x)
        chunks = torch.split(x, self.chunk_size(x))
        # Of copies, because a transform may change its input.
        return torch.cat([transform(self.floats(chunk.clone())) for chunk in chunks])

    @property
    def transforms_batches(self) -> bool:
        """Whether the task's transform is part of every step."""
        return self.fixed is None and self.task.transform is not None

    @property
    def x(self) -> Tensor:
        """The inputs that batches are gathered from."""
        return self.task.train_x if self.fixed is None else self.fixed

    @property
    def parts(self) -> Sequence[Feed]:
        """Feeds of the tasks that are learned together: just this one."""
        return [self]

    @property
    def share(self) -> float:
        """The fraction of every batch that this process takes."""
        return self.batch_size / self._drawn

    def guess(self) -> float:
        """Accuracy of the best guess: the share of the most frequent class."""
        return float(self.task.train_y.bincount().max()) / len(self)

    def sample_epoch(self, generator: torch.Generator) -> Draws:
        """An epoch's random numbers: the rows of each batch, `[steps, batch]`, and how they are
        augmented and turned.

        All batches have the same size: the last one is filled up with the epoch's first rows,
        because a batch norm's statistics of a handful of samples would be far off.
        """
        count = self.turns * len(self)
        order = torch.randperm(count, generator=generator, device=generator.device)
        missing = self.steps_per_epoch * self._drawn - count
        rows = torch.cat([order, order[:missing]]).view(self.steps_per_epoch, self._drawn)
        draws = {"rows": rows}
        if self.recipe.rotations:
            draws = {"rows": rows % len(self), "turns": rows // len(self)}
        if self.recipe.augments:
            coins, offsets = self.augmentation(draws["rows"].shape, generator)
            draws |= {"coins": coins, "offsets": offsets}
        return {name: drawn[:, self._mine] for name, drawn in draws.items()}

    def augmentation(self, shape: Sequence[int], generator: torch.Generator) -> Augmentation:
        """Random numbers to augment samples, of which there are as many as in `shape`."""
        coins, offsets = draw_augmentation(math.prod(shape), self.recipe.crop, generator)
        coins = coins if self.recipe.flip else torch.zeros_like(coins)
        return Augmentation(coins.view(*shape), offsets.view(*shape, 2))

    def batch(self, x: Tensor, draw: Draws, at: Tensor | None = None) -> Tensor:
        """The inputs of one step.

        Args:
            x: all inputs, `self.x`; with a leading dimension of replicas, those of each.
            draw: the step's random numbers.
            at: the `flat_rows` of the batch, if they are known already.
        """
        if "coins" in draw and "turns" not in draw and self._has_kernel(x):
            at = flat_rows(draw["rows"], x.shape[1]) if at is None else at
            return self._by_kernel(x, draw, at)
        samples = take(x, draw["rows"]) if at is None else take_flat(x, at)
        if not draw.keys() & {"coins", "turns"}:
            return self.scaled(self.floats(samples))
        images = samples.view(-1, *x.shape[-3:])
        if "coins" in draw:  # before conversion to floats, because bytes are faster
            augmentation = Augmentation(draw["coins"].flatten(), draw["offsets"].flatten(0, -2))
            images = augment(images, self.recipe.crop, augmentation)
        images = self.floats(images)
        if self.task.transform is not None:
            images = self.task.transform(images)
        if "turns" in draw:  # last, as a network turns inputs that were transformed
            images = turn(images, draw["turns"].flatten())
        return self.scaled(images.reshape(*samples.shape[:-3], *images.shape[1:]))

    def labels(self, y: Tensor, draw: Draws, at: Tensor | None = None) -> Tensor:
        """The labels of one step. Class c of C, turned r times, is class r·C + c."""
        labels = take(y, draw["rows"]) if at is None else take_flat(y, at)
        return labels + draw["turns"] * self.task.classes if "turns" in draw else labels

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
        batch = augmented(
            x.view(-1, *x.shape[-3:]),
            at.flatten(),
            draw["coins"].flatten(),
            draw["offsets"].flatten(0, -2),
            self.recipe.crop,
            self.recipe.pixels,
            self.channels_last and at.dim() == 1,
        )
        return batch if at.dim() == 1 else batch.view(*at.shape, *x.shape[-3:])

    def train(self, most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Training data without augmentation, in chunks: at most `most` samples, always the same
        ones. They are chosen at random, because samples may be sorted by class."""
        x, y = self.x, self.task.train_y
        if len(self) > most:
            generator = seeds.generator(0, "looked at")
            order = torch.randperm(len(self), generator=generator, device=generator.device)
            rows = order[:most].sort().values.to(self.device)
            x, y = x.index_select(0, rows), y.index_select(0, rows)
        chunks = self._split(x, y)
        if self.fixed is None:
            return ((self._inputs(x), y) for x, y in chunks)
        return ((self.scaled(self.floats(x)), y) for x, y in chunks)

    def train_turned(self, most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """As `train`; with rotations, images in all four turns and the labels of turned classes."""
        if not self.recipe.rotations:
            return self.train(most)
        counted = torch.arange(self.turns, device=self.device)[:, None] * self.task.classes
        return (
            (all_turns(x), (counted + y).flatten())
            for x, y in self.train(max(1, most // self.turns))
        )

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        chunks = self._split(self.task.test_x, self.task.test_y)
        return ((self._inputs(x), y) for x, y in chunks)

    def sample(self, most: int, generator: torch.Generator) -> Iterator[Tensor]:
        """Batches of at most `most` shuffled training inputs, not augmented. With rotations only a
        quarter of them, as each will be run in four turns."""
        rows = torch.randperm(len(self), generator=generator, device=generator.device)
        rows = rows[: math.ceil(most / self.turns)].to(self.device)
        for part in in_equal_parts(rows, self.chunk_size(self.task.train_x) // self.turns):
            yield self._inputs(self.task.train_x.index_select(0, part))

    @property
    def byte_scale(self) -> float | None:
        """The factor that makes inputs of the bytes in `fixed`, if no more than a factor is needed.
        It may be applied to a product with them instead, which has fewer numbers."""
        if self.fixed is None or self.fixed.dtype != torch.uint8 or self.recipe.pixels == "centred":
            return None
        return 1 / 255 if self.recipe.pixels == "unit" else 1.0

    def floats(self, x: Tensor) -> Tensor:
        return as_floats(x, self.dtype)

    def scaled(self, x: Tensor) -> Tensor:
        return as_inputs(x, self.recipe, self.dtype)

    def _split(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        size = self.chunk_size(x)
        # Copies, because a module may change its input; bytes are converted anyway.
        parts = (x if x.dtype == torch.uint8 else x.clone() for x in in_equal_parts(x, size))
        return zip(parts, in_equal_parts(y, size), strict=True)

    def _inputs(self, x: Tensor) -> Tensor:
        transform = self.task.transform
        if isinstance(transform, Permutation):  # before conversion to floats: bytes are faster
            return self.scaled(self.floats(transform(x)))
        x = self.floats(x)
        return self.scaled(x if transform is None else transform(x))

    def chunk_size(self, x: Tensor) -> int:
        """How many samples of the shape of `x[0]` to evaluate together."""
        if self.device.type == "cpu":
            return _CHUNK
        return max(256, _CHUNK_BYTES // (4 * x[0].numel()))


def why_unturnable(task: Task) -> str | None:
    """Why a task cannot be learned with rotations, if it cannot."""
    failed = f"task {task.name!r} cannot be learned with rotations"
    try:
        check_square(task.train_x)
    except DataError as error:
        return f"{failed}: {error}"
    if isinstance(task.transform, Permutation | Rotation):
        done = "rotated" if isinstance(task.transform, Rotation) else "permuted"
        return f"{failed}: its images are {done} already"
    return None


def in_equal_parts(x: Tensor, most: int) -> Sequence[Tensor]:
    """Parts of at most `most` rows and of nearly equal size: in a small one, a batch norm's
    statistics would be far off.

    >>> [len(part) for part in in_equal_parts(torch.zeros(2049), 2048)]
    [1025, 1024]
    """
    return torch.tensor_split(x, math.ceil(len(x) / most))


def as_floats(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Unscaled inputs in the network's dtype, but in at least float32, which transforms need."""
    return to_float(x, torch.promote_types(dtype, torch.float32))


def as_inputs(x: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """Scaled inputs for a network in that dtype, without gradients; indices stay as they are."""
    return scaled(x.detach().to(dtype), recipe) if x.is_floating_point() else x


def scaled(x: Tensor, recipe: Recipe) -> Tensor:
    """Pixels from 0 to 1, scaled as the recipe says."""
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
    """Indices of replicas' rows in their concatenated tables, each of that length."""
    return rows + _starts(len(rows), length, rows.device) if rows.dim() > 1 else rows


def take_flat(table: Tensor, rows: Tensor) -> Tensor:
    if rows.dim() == 1:
        return table.index_select(0, rows)
    samples = table.flatten(0, 1).index_select(0, rows.flatten())
    return samples.view(*rows.shape, *table.shape[2:])


@cache
def _starts(replicas: int, length: int, device: torch.device) -> Tensor:
    return torch.arange(replicas, device=device)[:, None] * length

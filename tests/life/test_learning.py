"""How long tasks are learned, where few samples would give few steps."""

import math

import pytest
import torch

import rankup
from rankup.data import Task
from rankup.life.learning import _recipe


@pytest.mark.parametrize(
    ("samples", "batch", "steps"), [(20, 8, 700), (400, 64, 700), (4000, 64, 0)]
)
def test_few_photographs_are_learned_for_as_many_steps(
    samples: int, batch: int, steps: int
) -> None:
    task = Task("a", 2, *_images(samples), *_images(10))
    net = rankup.grow(rankup.models.resnet18(2, image_size=4), rankup.Rank(1, 1))
    recipe = _recipe(net, task)
    each = math.ceil(samples / recipe.batch)
    assert recipe.batch == batch
    assert recipe.epochs * each >= steps
    assert recipe.epochs == 30 or (recipe.epochs - 1) * each < steps


def test_pretrained_network_needs_no_more_steps() -> None:
    task = Task("a", 2, *_images(40), *_images(10))
    net = rankup.grow(rankup.models.mlp(48, hidden=[4]), rankup.Rank(1, 1), base="keep")
    assert _recipe(net, task).epochs <= 60


def _images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(count, 3, 4, 4, dtype=torch.uint8), torch.arange(count) % 2

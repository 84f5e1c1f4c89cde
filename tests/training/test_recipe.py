"""Recipes: their names, what fits a task, and what is refused."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rankup
from rankup.data.streams import make_stream
from rankup.rank import Rank
from rankup.training.engine.module import loss_of
from rankup.training.fit import default_recipe
from rankup.training.recipe import PAPER, Recipe, recipe_for


def test_losses_are_cross_entropy_and_squared_error() -> None:
    answer, labels = torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 0])
    torch.testing.assert_close(loss_of(Recipe(), answer, labels), F.cross_entropy(answer, labels))
    squared = (answer.softmax(1) - torch.eye(3)[labels]) ** 2
    torch.testing.assert_close(loss_of(PAPER, answer, labels), squared.mean())


def test_missing_classes_do_not_count() -> None:
    answer, labels = torch.randn(8, 2), torch.arange(8) % 2
    beside = torch.cat([answer, torch.full((8, 3), -math.inf)], 1)
    for recipe in (Recipe(), PAPER):
        alone, among = (loss_of(recipe, logits, labels) for logits in (answer, beside))
        torch.testing.assert_close(among, alone)


def test_paper_recipe_is_the_notebooks() -> None:
    recipe = recipe_for("paper", colour=True)
    assert (recipe.epochs, recipe.batch, recipe.lr, recipe.first_lr) == (500, 128, 1e-4, 1e-5)
    assert (recipe.loss, recipe.pixels, recipe.schedule) == ("mse", "raw", "constant")
    assert recipe.selector_start() == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"first_factors": -1.0}, "first_factors must not be negative, got -1.0"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"batch": -1}, "batch must be at least 1, got -1"),
        ({"lr": 0}, "lr must be positive, got 0"),
        ({"weight_decay": -0.1}, "weight_decay must not be negative, got -0.1"),
        ({"warmup": 1.0}, "warmup must be at least 0 and below 1, got 1.0"),
        ({"schedule": "linear"}, "schedule must be one of one-cycle, constant, got 'linear'"),
        ({"selectors": "old"}, "selectors must be 'previous', 'halfway' or a number, got 'old'"),
        ({"crop": -1}, "crop must be at least 0, got -1"),
        ({"epochs": 1.5}, "epochs must be a whole number, got 1.5"),
        ({"epochs": True}, "epochs must be a whole number, got True"),
        ({"batch": "3"}, "batch must be a whole number, got '3'"),
        ({"weight_decay": math.nan}, "weight_decay must be a finite number, got nan"),
        ({"lr": math.inf}, "lr must be a finite number, got inf"),
        ({"lr": None}, "lr must be a finite number, got None"),
        ({"flip": "no"}, "flip must be True or False, got 'no'"),
        ({"selectors": None}, "selectors must be 'previous', 'halfway' or a number, got None"),
        ({"selectors": "nan"}, "selectors must be 'previous', 'halfway' or a number, got 'nan'"),
    ],
)
def test_bad_recipes_are_refused(options: dict, message: str) -> None:
    with pytest.raises(rankup.RankupError, match=message):
        Recipe(**options)


def test_unknown_recipe_is_refused() -> None:
    with pytest.raises(rankup.RankupError, match="there is no recipe 'best', only default, paper"):
        recipe_for("best")


def test_smallest_images_are_not_cropped() -> None:
    assert [recipe_for("default", colour=True, size=size).crop for size in (1, 2, 32)] == [0, 1, 3]


@pytest.mark.parametrize("shape", [(3, 16, 256), (3, 256, 16)])
def test_crop_follows_the_shorter_side(shape: tuple[int, ...]) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network = rankup.grow(module.append(nn.Linear(4, 2)), Rank(2, 1))
    x, y = torch.zeros(4, *shape, dtype=torch.uint8), torch.tensor([0, 1, 0, 1])
    assert default_recipe(network, rankup.Task("wide", 2, x, y, x, y)).crop == 2


def test_default_recipe_adapts_to_task_and_network() -> None:
    few = make_stream("s-digits")[0]
    mlp = rankup.grow(rankup.models.mlp(64, hidden=[16]), Rank(2, 1))
    assert default_recipe(mlp, few) == recipe_for("default", samples=len(few.train_y), size=8)
    chosen = rankup.grow(rankup.models.mlp(64, hidden=[16]), Rank(0, 0, seeded=8))
    assert default_recipe(chosen, few).lr == 2e-2
    x = torch.zeros(4, 3, 32, 32, dtype=torch.uint8)
    y = torch.tensor([0, 1, 0, 1])
    photos = rankup.Task("photos", 2, x, y, x, y)
    convolutions = rankup.grow(rankup.models.resnet18(width=4), Rank(2, 1))
    wanted = recipe_for("default", colour=True, size=32, samples=4, net="resnet18")
    assert default_recipe(convolutions, photos) == wanted
    assert wanted.flip
    maps = replace(photos, train_x=x.float(), test_x=x.float())  # may not be images
    assert not default_recipe(convolutions, maps).augments
    seen: list[int] = []
    rankup.fit(mlp, few, on_epoch=lambda epoch, _: seen.append(epoch.epochs))
    assert seen == [60] * 60

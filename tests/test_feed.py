"""What a task's training data looks like on its way into a network."""

import pytest
import torch
from torch import Tensor

import rankup
from rankup.feed import Feed
from rankup.rank import Rank
from rankup.recipe import Recipe
from zoo import blobs

CPU = torch.device("cpu")


def numbered(samples: int, classes: int) -> rankup.Task:
    """Classes that take turns, and inputs that say which sample it is."""
    x, y = torch.arange(samples)[:, None].float(), torch.arange(samples) % classes
    return rankup.Task("turns", classes, x, y, x[:9], y[:9])


def looked_at(feed: Feed, most: int) -> tuple[Tensor, Tensor]:
    inputs, labels = zip(*feed.train(most), strict=True)
    return torch.cat(inputs), torch.cat(labels)


def test_classes_that_take_turns_are_all_looked_at() -> None:
    feed = Feed(numbered(8000, 4), Recipe(), CPU)
    x, y = looked_at(feed, 2000)
    assert y.bincount().tolist() == pytest.approx([500] * 4, rel=0.1)
    assert len(x.unique()) == 2000
    assert torch.equal(x[:, 0].long() % 4, y)
    assert torch.equal(looked_at(feed, 2000)[0], x)


@pytest.mark.parametrize("most", [5000, 6000])
def test_all_samples_are_looked_at_in_their_order(most: int) -> None:
    task = numbered(5000, 4)
    x, y = looked_at(Feed(task, Recipe(), CPU), most)
    assert torch.equal(x, task.train_x)
    assert torch.equal(y, task.train_y)


@pytest.mark.parametrize("recipe", [Recipe(flip=True), Recipe(crop=1)])
def test_only_images_can_be_mirrored_and_shifted(recipe: Recipe) -> None:
    net = rankup.grow(rankup.models.mlp(12, hidden=[8]), Rank(2, 1))
    message = r"for images of shape \[N, C, H, W\], task '0' has training inputs .* \[60, 12\]"
    with pytest.raises(rankup.RankupError, match=message):
        rankup.fit(net, blobs(0, 12), recipe)
    assert net.learning is None

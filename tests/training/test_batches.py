"""Batches of a task's data: order, scale and augmentation."""

import pytest
import torch
from torch import Tensor

import rankup
from helpers.clusters import CPU, QUICK, clusters
from helpers.zoo import GPU, blobs
from rankup import kernels
from rankup.data.streams import make_stream
from rankup.data.transforms import Permutation
from rankup.rank import Rank
from rankup.training.batches import Feed
from rankup.training.recipe import Recipe


def numbered(samples: int, classes: int) -> rankup.Task:
    """Alternating classes, and inputs that identify the sample."""
    x, y = torch.arange(samples)[:, None].float(), torch.arange(samples) % classes
    return rankup.Task("turns", classes, x, y, x[:9], y[:9])


def looked_at(feed: Feed, most: int) -> tuple[Tensor, Tensor]:
    inputs, labels = zip(*feed.train(most), strict=True)
    return torch.cat(inputs), torch.cat(labels)


def test_sampled_classes_are_balanced_and_repeatable() -> None:
    feed = Feed(numbered(8000, 4), Recipe(), CPU)
    x, y = looked_at(feed, 2000)
    assert y.bincount().tolist() == pytest.approx([500] * 4, rel=0.1)
    assert len(x.unique()) == 2000
    assert torch.equal(x[:, 0].long() % 4, y)
    assert torch.equal(looked_at(feed, 2000)[0], x)


@pytest.mark.parametrize("most", [5000, 6000])
def test_small_data_is_used_whole_and_in_order(most: int) -> None:
    task = numbered(5000, 4)
    x, y = looked_at(Feed(task, Recipe(), CPU), most)
    assert torch.equal(x, task.train_x)
    assert torch.equal(y, task.train_y)


@pytest.mark.parametrize("recipe", [Recipe(flip=True), Recipe(crop=1)])
def test_augmenting_other_data_than_images_is_refused(recipe: Recipe) -> None:
    net = rankup.grow(rankup.models.mlp(12, hidden=[8]), Rank(2, 1))
    message = r"for images of shape \[N, C, H, W\], but task '0' has training inputs .* \[60, 12\]"
    with pytest.raises(rankup.RankupError, match=message):
        rankup.fit(net, blobs(0, 12), recipe)
    assert net.learning is None


@GPU
@pytest.mark.parametrize("seeds", [0, 3], ids=["alone", "replicas"])
def test_batches_agree_with_and_without_kernels(
    seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, draw = torch.device("cuda"), torch.Generator("cuda").manual_seed(0)
    x = torch.randint(256, (50, 3, 9, 7), generator=draw, dtype=torch.uint8, device=device)
    y = torch.arange(50, device=device) % 5
    task = rankup.Task("images", 5, x, y, x[:5], y[:5])
    feed = Feed(task, Recipe(batch=16, flip=True, crop=3, pixels="centred"), device)
    feed.channels_last = True
    drawn = [{k: t[0] for k, t in feed.sample_epoch(draw).items()} for _ in range(max(1, seeds))]
    table, entry = x, drawn[0]
    if seeds:
        table = torch.stack([x, x.flip(0), x.flip(1)])
        entry = {name: torch.stack([own[name] for own in drawn]) for name in entry}
    found = []
    for available in (True, False):
        monkeypatch.setattr(kernels, "is_available", lambda answer=available: answer)
        found.append(feed.batch(table, entry))
    assert found[0].shape == ((3,) if seeds else ()) + (16, 3, 9, 7)
    assert torch.equal(*found)


class Halved:
    """A transform that gives images another size."""

    def __call__(self, x: Tensor) -> Tensor:
        return x[:, :, ::2, ::2]

    def to(self, device: torch.device | str) -> "Halved":
        return self


def test_transform_may_resize_augmented_images() -> None:
    x = torch.arange(2 * 64.0).view(2, 1, 8, 8)
    y = torch.arange(2)
    feed = Feed(rankup.Task("a", 2, x, y, x, y, Halved()), Recipe(flip=True), torch.device("cpu"))
    made = feed.batch(
        x, {"rows": y, "coins": y == 1, "offsets": torch.zeros(2, 2, dtype=torch.long)}
    )
    assert torch.equal(made, torch.stack([x[0], x[1].flip(-1)])[:, :, ::2, ::2])


def test_pixels_are_scaled_by_the_recipe() -> None:
    x = torch.tensor([[[[0, 255]]], [[[51, 0]]]], dtype=torch.uint8)
    y = torch.tensor([0, 1])
    task = rankup.Task("a", 2, x, y, x, y, Permutation(torch.tensor([1, 0])))
    for pixels, expected in (
        ("unit", (1.0, 0.2)),
        ("centred", (1.0, -0.6)),
        ("raw", (255.0, 51.0)),
    ):
        feed = Feed(task, Recipe(pixels=pixels), CPU)
        made = feed.batch(feed.x, {"rows": torch.tensor([0, 1])})
        assert [float(made[0, 0, 0, 0]), float(made[1, 0, 0, 1])] == pytest.approx(list(expected))
        torch.testing.assert_close(made, next(feed.test())[0])


def test_only_training_batches_are_augmented() -> None:
    stream = make_stream("p-digits", tasks=1)
    feed = Feed(stream[0], Recipe(flip=True, crop=2), CPU)
    draws = feed.sample_epoch(torch.Generator().manual_seed(0))
    draw = {name: entries[0] for name, entries in draws.items()}
    plain = next(feed.train(len(feed)))[0]
    augmented = feed.batch(feed.x, draw)
    changed = (augmented != plain[draw["rows"]]).flatten(1).any(1)
    assert float(changed.float().mean()) > 0.8
    assert torch.equal(next(feed.train(len(feed)))[0], plain)


def test_samples_of_sorted_data_have_all_classes() -> None:
    task = clusters("sorted")
    order = task.train_y.argsort()
    x, y = task.train_x[order].repeat(120, 1, 1).transpose(0, 1), task.train_y[order]
    x, y = x.reshape(-1, 12), y.repeat_interleave(120)
    assert set(y[:8000].tolist()) == {0}  # the first class alone would fill the samples checked
    feed = Feed(rankup.Task("sorted", 3, x, y, task.test_x, task.test_y), QUICK, CPU)
    seen = torch.cat([labels for _, labels in feed.train(1000)])
    assert len(seen) <= 1000
    assert seen.bincount().tolist() == pytest.approx([len(seen) / 3] * 3, rel=0.1)


def test_each_epoch_has_every_sample_in_a_new_order() -> None:
    feed = Feed(clusters(), Recipe(epochs=3, batch=64), CPU)
    orders = []
    for seed in range(9):
        rows = feed.sample_epoch(torch.Generator().manual_seed(seed))["rows"]
        assert rows.shape == (4, 64)  # 200 samples and the first 56 of them again
        order = rows.flatten().tolist()
        assert sorted(order[:200]) == list(range(200))
        assert order[200:] == order[:56]
        orders.append(tuple(order))
    assert len(set(orders)) == 9

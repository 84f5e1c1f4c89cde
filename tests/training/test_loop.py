"""Training on one task: results, failures and accuracy."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rankup
from helpers.clusters import (
    CPU,
    QUICK,
    clusters,
    net,
    right,
)
from helpers.zoo import assert_same_bits, logits
from rankup.data.streams import make_stream
from rankup.data.transforms import to_float
from rankup.layers import FactoredLayer
from rankup.rank import Rank
from rankup.training.batches import Feed
from rankup.training.fit import NetPupil
from rankup.training.recipe import Recipe


def test_fit_learns_commits_and_returns_the_network() -> None:
    network = net()
    for seed in range(3):
        task = clusters(f"{seed}", classes=2 + seed, seed=seed)
        assert rankup.fit(network, task, QUICK) is network
        assert right(network, task) > 0.95
    assert network.tasks == ["0", "1", "2"]


def test_numpy_numbers_are_accepted() -> None:
    task = clusters()
    same = rankup.Task("same", np.int64(3), task.train_x, task.train_y, task.test_x, task.test_y)
    assert type(same.classes) is int
    assert len(make_stream("p-digits", seed=np.int64(1), tasks=np.int32(2))) == 2
    network = net()
    network.begin_task("same", np.int64(3), selectors=np.float32(0.5), factors=np.float64(2))
    assert network.learning == "same"


@pytest.mark.parametrize("before", [True, False])
def test_cudnn_is_deterministic_during_fit_only(
    before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", before)
    seen: list[bool] = []

    def look(*_: object) -> None:
        seen.append(torch.backends.cudnn.deterministic)

    rankup.fit(net(), clusters(), QUICK, on_epoch=look)
    assert set(seen) == {True}
    assert torch.backends.cudnn.deterministic is before


def test_numpy_seeds_are_accepted() -> None:
    one, same = (rankup.fit(net(), clusters(), QUICK, seed=seed) for seed in (1, np.int64(1)))
    assert_same_bits(logits(one, clusters().test_x), logits(same, clusters().test_x))


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_fit_restores_matmul_precision(precision: str) -> None:
    product = torch.backends.cuda.matmul
    before = product.fp32_precision
    product.fp32_precision = precision
    try:
        rankup.fit(net(), clusters(), replace(QUICK, precision="tf32"))
        assert product.fp32_precision == precision
    finally:
        product.fp32_precision = before


@pytest.mark.parametrize(("first", "lengths"), [(0.0, [3.0, 3.0]), (8.0, [8.0, 3.0])])
def test_first_factors_sets_the_first_tasks_lengths(first: float, lengths: list[float]) -> None:
    recipe = Recipe(factors=3.0, first_factors=first)
    net = rankup.grow(rankup.models.mlp(64, hidden=[8]), Rank(2, 1))
    pupil = NetPupil(net, recipe, 0)
    for task, length in zip(make_stream("s-digits").tasks[:2], lengths, strict=True):
        pupil.begin(task)
        (layer,) = (part for part in net.parts if isinstance(part, FactoredLayer))
        for vectors in (layer.new_U, layer.new_V):
            torch.testing.assert_close(vectors.norm(dim=1), torch.full((len(vectors),), length))
        pupil.end()


def test_diverging_task_is_abandoned() -> None:
    network = rankup.fit(net(), clusters("good"), QUICK)
    x = clusters().test_x
    before = logits(network, x)
    with pytest.raises(rankup.TaskFailed, match="task 'bad' diverged: the loss of epoch 1 is nan"):
        rankup.fit(network, clusters("bad"), Recipe(epochs=2, lr=1e30, schedule="constant"))
    assert network.tasks == ["good"]
    assert network.learning is None
    assert_same_bits(before, logits(network, x))
    rankup.fit(network, clusters("bad"), QUICK)


def test_task_that_ends_at_guessing_is_abandoned() -> None:
    network = rankup.fit(net(), clusters("good"), QUICK)
    task = clusters("noise", classes=2)
    labels = torch.randint(2, task.train_y.shape, generator=torch.Generator().manual_seed(0))
    noise = rankup.Task("noise", 2, task.train_x * 0, labels, task.test_x, task.test_y)
    with pytest.raises(rankup.TaskFailed, match="'noise' was not learned: .* above guessing"):
        rankup.fit(network, noise, QUICK)
    assert network.tasks == ["good"]


def test_one_standard_error_above_guessing_is_not_learned() -> None:
    """Four labels of a hundred can be known, which is less than one standard error."""
    y = torch.arange(100) % 2
    x = torch.zeros(100, 12)
    x[:4] = torch.eye(12)[y[:4]]  # always right, all others are guesses: 52 %
    task = rankup.Task("hardly", 2, x, y, x, y)
    with pytest.raises(rankup.TaskFailed, match="'hardly' was not learned: 5[0-9].0%"):
        rankup.fit(net(), task, QUICK)


def test_few_samples_that_are_all_right_count_as_learned() -> None:
    x = torch.eye(4).repeat(1, 3)
    few = rankup.Task("few", 2, x, torch.tensor([0, 1, 0, 1]), x, torch.tensor([0, 1, 0, 1]))
    network = rankup.fit(net(), few, Recipe(epochs=100, batch=4))
    assert right(network, few) == 1


def test_batch_norms_are_calibrated_on_the_task() -> None:
    task = make_stream("r-digits", tasks=1)[0]
    network = rankup.grow(rankup.models.resnet18(width=4, image_size=8, channels=1), Rank(2, 1))
    rankup.fit(network.train(), task, Recipe(epochs=1, batch=128))
    feed = Feed(task, Recipe(), CPU)
    assert feed.fixed is not None
    with torch.no_grad():
        stem = network.body.stem.merged(0)(feed.scaled(to_float(feed.fixed)))
    expected = stem.mean((0, 2, 3))
    torch.testing.assert_close(network.body.norm.means[0], expected, rtol=1e-3, atol=1e-4)


def test_dropout_is_on_in_steps_and_off_in_answers() -> None:
    seen = {True: 0, False: 0}

    class Watched(torch.nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            seen[self.training] += 1
            return super().forward(x)

    body = torch.nn.Sequential(
        torch.nn.Linear(12, 16), Watched(0.1), torch.nn.ReLU(), torch.nn.Linear(16, 2)
    )
    network = rankup.grow(body, Rank(2, 1), head="3").eval()
    seen[False] = seen[True] = 0
    rankup.fit(network, clusters(classes=2), QUICK, on_epoch=lambda epoch, _: epoch.accuracy())
    assert seen[True] == 1 + 15 * 7  # a first look, and the steps
    assert seen[False] == 1 + 15 + 1  # a first look, one after each epoch, and the last verdict
    assert not network.training


def test_accuracy_is_the_share_of_correct_test_samples() -> None:
    stream = make_stream("p-digits", tasks=2)
    network = rankup.grow(rankup.models.mlp(64, hidden=[32]), Rank(4, 1)).train()
    for task in stream:
        rankup.fit(network, task, Recipe(epochs=10))
    second = stream[1]
    x = second.transform(to_float(second.test_x))
    network.eval()
    wanted = (network(x, second.name).argmax(1) == second.test_y).double().mean()
    network.train()
    assert rankup.accuracy(network, second) == pytest.approx(float(wanted))
    assert rankup.accuracy(network, second) > 0.5
    assert network.training
    with pytest.raises(rankup.RankupError, match="there is no task 'permutation 03'"):
        rankup.accuracy(network, make_stream("p-digits", tasks=3)[2])


def test_orders_differ_by_seed_task_and_epoch() -> None:
    seen: list[tuple[int, ...]] = []

    class Watched(Feed):
        def sample_epoch(self, generator: torch.Generator) -> dict[str, Tensor]:
            drawn = super().sample_epoch(generator)
            seen.append(tuple(drawn["rows"].flatten().tolist()))
            return drawn

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rankup.training.fit.Feed", Watched)
        for seed in (0, 1):
            network = net()
            for name in ("a", "b"):
                rankup.fit(network, clusters(name), replace(QUICK, epochs=2), seed=seed)
    assert len(set(seen)) == len(seen) == 8


def rare(samples: int, knows: bool) -> rankup.Task:
    """Two of a hundred samples are of the second class, which inputs tell if `knows`."""

    def drawn() -> tuple[Tensor, Tensor]:
        x = torch.randn(samples, 20)
        likely = torch.sigmoid(2.2 * x[:, 0] + 1.5 * x[:, 1] - 6.5)
        return (x if knows else torch.randn(samples, 20)), (torch.rand(samples) < likely).long()

    return rankup.Task("rare", 2, *drawn(), *drawn())


def test_task_with_a_rare_class_is_learned() -> None:
    task = rare(10_000, knows=True)
    net = rankup.fit(
        rankup.grow(rankup.models.mlp(20, hidden=[32, 32]), rankup.Rank(8, 1)),
        task,
        rankup.Recipe(epochs=4),
    )
    score = net(task.test_x, task=0)[:, 1] - net(task.test_x, task=0)[:, 0]
    rank_of = score.argsort().argsort().double()
    rare_ones = task.test_y == 1
    worse = rank_of[rare_ones].mean() - (int(rare_ones.sum()) - 1) / 2
    assert worse / int((~rare_ones).sum()) > 0.85  # the area under the curve


def test_unlearnable_rare_class_is_refused() -> None:
    recipe = rankup.Recipe(epochs=1, lr=1e-4)
    with pytest.raises(rankup.TaskFailed, match="not three standard errors above guessing"):
        rankup.fit(
            rankup.grow(rankup.models.mlp(20, hidden=[32, 32]), rankup.Rank(8, 1)),
            rare(10_000, knows=False),
            recipe,
        )


def test_float64_inputs_keep_their_digits() -> None:
    z = torch.randn(1000, 4, dtype=torch.float64)
    x, y = z + 1.7e9, (z[:, 0] > 0).long()
    task = rankup.Task("far", 2, x, y, x, y)
    layers = nn.BatchNorm1d(4), nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)
    net = rankup.grow(nn.Sequential(*layers).double(), rankup.Rank(4, 1))
    rankup.fit(net, task, rankup.Recipe(epochs=10))
    assert rankup.accuracy(net, task) > 0.95


class Backbone(nn.Module):
    """Makes the data, and has parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@pytest.mark.parametrize(("module", "how"), [("chain", "features"), ("tanh", "transform")])
def test_transform_and_backbone_get_no_gradients(module: str, how: str) -> None:
    backbone = Backbone()
    hidden = nn.ReLU() if module == "chain" else nn.Tanh()
    own = nn.Sequential(nn.Linear(12, 16), hidden, nn.Linear(16, 2))
    network = rankup.grow(own, Rank(2, 1, seeded=8))
    for name in "ab":
        task = clusters(name)
        if how == "features":
            made = {part: backbone(getattr(task, part)) for part in ("train_x", "test_x")}
            task = replace(task, **made)
        else:
            task = replace(task, transform=backbone)
        rankup.fit(network, task, Recipe(epochs=8, batch=32, lr=3e-2))
    assert network.tasks == ["a", "b"]
    assert backbone.linear.weight.grad is None


def test_accuracy_refuses_other_numbers_of_classes() -> None:
    network, task = net(), clusters()
    rankup.fit(network, task, QUICK)
    with pytest.raises(rankup.RankupError, match="'clusters' with 3 classes, but this one has 5"):
        rankup.accuracy(network, clusters(classes=5))


def test_two_steps_learn_an_easy_task() -> None:
    x = torch.cat([-torch.ones(64, 12), torch.ones(64, 12)])
    y = (torch.arange(128) >= 64).long()
    task = rankup.Task("apart", 2, x, y, x, y)
    network = rankup.fit(net(), task, Recipe(epochs=2, batch=128, lr=0.1))
    assert rankup.accuracy(network, task) > 0.9

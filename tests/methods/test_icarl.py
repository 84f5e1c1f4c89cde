"""iCaRL: exemplars by herding, distillation, and the nearest mean."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import rankup
from helpers.little import (
    CLASSES,
    after,
    answer,
    cross_entropies,
    entry,
    gradient,
    little_stream,
    make,
)
from rankup.data.streams import Stream, make_stream
from rankup.methods.icarl import ICaRL, Lists, herded
from rankup.training.engine.eager import Eager

BUDGET = {"budget": 30}


def brute(features: Tensor, count: int) -> list[int]:
    """Herding as the paper writes it: try every sample that is left."""
    mean, chosen = features.mean(0), []
    for _ in range(min(count, len(features))):
        left = [row for row in range(len(features)) if row not in chosen]
        off = [float((mean - features[[*chosen, row]].mean(0)).norm()) for row in left]
        chosen.append(left[off.index(min(off))])
    return chosen


@torch.no_grad()
def embedded(method: ICaRL, x: Tensor) -> Tensor:
    """A plain MLP's normalised features."""
    x = x.flatten(1)
    for layer in method.body.hidden:
        x = torch.relu(x @ layer.weight.T + layer.bias)
    return x / x.norm(dim=1, keepdim=True)


def centred(images: Tensor) -> Tensor:
    return images / 255 * 2 - 1


def plain_means(method: ICaRL, task: int) -> Tensor:
    means = []
    for label in range(2):
        mean = embedded(method, centred(method.buffer[f"{task}/{label}"])).mean(0)
        means.append(mean / mean.norm())
    return torch.stack(means)


@pytest.mark.parametrize("normal", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_herding_is_the_greedy_match_of_the_mean(seed: int, normal: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(25, 6, dtype=torch.float64, generator=draw).abs()
    features = F.normalize(features) if normal else features
    found = herded(features, 12).tolist()
    assert found == brute(features, 12)
    assert len(set(found)) == 12
    assert herded(features, 5).tolist() == found[:5]
    assert sorted(herded(features, 40).tolist()) == list(range(25))


def test_lists_say_whose_exemplar_is_where() -> None:
    lists = Lists([[2, 1], [0, 3, 1]], 9)
    assert lists.tasks.tolist() == [0, 0, 0, 1, 1, 1, 1, 0, 0]
    assert lists.labels.tolist() == [0, 0, 1, 1, 1, 1, 2, 0, 0]
    assert Lists([], 2).tasks.tolist() == [0, 0]


def test_exemplars_are_herded_by_features() -> None:
    stream = make_stream("s-digits")
    method = make("icarl", stream, options=BUDGET, pixels="centred")
    for index, task in enumerate(stream.tasks[:2]):
        method.learn(task, None, None)
        features = embedded(method, centred(task.train_x)).double()
        for label in range(2):
            rows = (task.train_y == label).nonzero().flatten()
            best = rows[brute(features[rows], 30 // (2 + 2 * index))]
            assert torch.equal(method.buffer[f"{index}/{label}"], task.train_x[best])


def test_budget_is_shared_by_the_classes_seen() -> None:
    stream = little_stream()
    method = make("icarl", stream, options=BUDGET)
    lengths, before = [], {}
    for index, task in enumerate(stream):
        method.begin(task)
        method.end()
        seen = sum(CLASSES[: index + 1])
        own = [f"{t}/{label}" for t in range(index + 1) for label in range(CLASSES[t])]
        assert list(method.buffer) == own
        lengths.append({len(images) for images in method.buffer.values()})
        assert method.footprint().buffer == 16 / 4 * sum(map(len, method.buffer.values()))
        for name, images in before.items():
            assert torch.equal(method.buffer[name], images[: 30 // seen])
        before = dict(method.buffer)
    assert lengths == [{8}, {6}, {3}]  # the first task's classes have only 8 samples each


def test_budget_below_one_per_class_is_refused() -> None:
    with pytest.raises(rankup.RankupError, match="budget must be at least 9, .* got 8"):
        make("icarl", little_stream(), options={"budget": 8})
    assert make("icarl", little_stream(), options={"budget": 9}).learned == 0


def test_every_exemplar_is_seen_about_once_in_an_epoch() -> None:
    stream = make_stream("s-digits")
    method = make("icarl", stream, options={"budget": 100})
    learner = after(method, stream, 2)
    assert learner.held == 100
    times = learner.sample_epoch(torch.Generator())["memory"].flatten().bincount(minlength=100)
    assert set(times.tolist()) <= {1, 2}
    assert times.double().mean() < 1.2


def test_small_tasks_exemplars_are_not_seen_more_often() -> None:
    small, large, *_ = make_stream("s-digits")
    small = replace(small, train_x=small.train_x[:20], train_y=small.train_y[:20])
    stream = Stream("sizes", (small, large))
    learner = after(make("icarl", stream, options={"budget": 100}), stream, 1)
    assert learner.held == 20
    times = learner.sample_epoch(torch.Generator())["memory"].flatten().bincount(minlength=20)
    assert set(times.tolist()) <= {1, 2}


def test_other_numbers_of_exemplars_share_no_graph() -> None:
    stream = little_stream(3, 3, 3, 3, 3)
    method = make("icarl", stream, options={"budget": 40})  # more than the samples of a task
    keys, replayed = [], []
    for task in stream:
        learner = method.begin(task)
        keys.append(learner.key())
        replayed.append(learner.replay)
        method.end()
    assert replayed == [0, 16, 27, 27, 27]
    assert [keys.index(key) for key in keys] == [0, 1, 2, 2, 2]


def moved(learner) -> None:
    """Change the learning network from what it was at the start."""
    draw = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in learner.body.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))


def test_loss_is_cross_entropy_and_distillation() -> None:
    """Against plain code, sample by sample and head by head."""
    stream = little_stream(3, 2, 4, 2)
    learner = after(make("icarl", stream, options={"budget": 30, "strength": 3.0}), stream, 2)
    draw = entry(learner)
    batches = learner.current(draw), learner.replayed(draw)
    x = torch.cat([batch.x for batch in batches])
    said = [answer(learner, x, task).detach() for task in range(2)]
    moved(learner)
    own = torch.cat([cross_entropies(learner, *batch) for batch in batches]).mean()
    kept = torch.zeros(())
    for task in range(2):
        p, q = answer(learner, x, task).sigmoid(), said[task].sigmoid()
        apart = -(q * p.log() + (1 - q) * (1 - p).log())
        kept = kept + apart.sum(1).mean() / 2
    loss, grads = gradient(learner, draw)
    torch.testing.assert_close(loss, own + 3 * kept, rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad(own + 3 * kept, list(learner.body.parameters()))
    for found, plain in zip(grads, expected, strict=True):
        torch.testing.assert_close(found, plain, rtol=1e-3, atol=1e-5)
    assert len(x) == 16 + 20
    assert not grads[-1][learner.body.head.slices[3]].any()  # a task to come


@pytest.mark.parametrize(
    ("net", "recipe"),
    [("mlp", {}), ("mlp", {"precision": "bfloat16"}), ("resnet18", {"flip": True, "crop": 1})],
)
def test_distillation_starts_without_a_pull(net: str, recipe: dict) -> None:
    """Bit for bit, with the tensors that the engine's steps work on."""
    stream = little_stream(3, 3, 3)
    learner = after(make("icarl", stream, net, options=BUDGET, **recipe), stream, 2)
    draw = entry(learner)
    steps = Eager([learner])

    def pull() -> list[Tensor]:
        with learner.bound(steps.tensors[0]):
            x = torch.cat([learner.current(draw).x, learner.replayed(draw).x])
            with learner._autocast():
                answers = learner._answers(learner.body, x)
                before = learner._answers(learner.old, x)
            loss = learner.distillation(answers, before)
            return list(torch.autograd.grad(loss, learner._leaves))

    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in pull())
    steps.epoch([{name: entries[None] for name, entries in draw.items()}], [[0.1]], 0)
    assert all(bool(grad.any()) for grad in pull()[:2])


def test_old_network_stays_frozen() -> None:
    stream = little_stream(3, 3, 3)
    learner = after(make("icarl", stream, "resnet18", options=BUDGET), stream, 1)
    before = {name: t.clone() for name, t in learner.old.state_dict().items()}
    assert not any(name.startswith("old") for name in learner.learned())
    steps = Eager([learner])
    drawn = learner.sample_epoch(torch.Generator().manual_seed(0))
    steps.epoch([drawn], [[0.01] * learner.feed.steps_per_epoch], 0)
    steps.adopt()
    after_it = learner.old.state_dict()
    assert all(torch.equal(tensor, after_it[name]) for name, tensor in before.items())
    assert not torch.equal(learner.body.stem.weight, learner.old.stem.weight)


@pytest.fixture(scope="module")
def digits() -> Stream:
    return make_stream("s-digits")


def test_an_answer_is_the_nearest_mean_of_exemplars(digits: Stream) -> None:
    method = make("icarl", digits, options=BUDGET, pixels="centred")
    for task in digits.tasks[:2]:
        method.learn(task, None, None)
    for index in range(2):
        x = centred(digits[index].test_x)
        means = plain_means(method, index)
        expected = [[-float((f - mean).norm()) for mean in means] for f in embedded(method, x)]
        torch.testing.assert_close(method.predict(x, index), torch.tensor(expected))
    method.begin(digits[2])
    x = centred(digits[2].test_x)
    torch.testing.assert_close(method.predict(x, 2), answer(method, x, 2))


def test_means_follow_the_network(digits: Stream) -> None:
    method = make("icarl", digits, options=BUDGET, pixels="centred")
    method.learn(digits[0], None, None)
    x = centred(digits[0].test_x)
    first = method.predict(x, 0)
    assert method.means(0) is method.means(0)  # computed once
    learner = method.begin(digits[1])
    assert torch.equal(method.predict(x, 0), first)
    for _ in range(2):  # while a task is open they change with every step
        moved(learner)
        torch.testing.assert_close(method.means(0), plain_means(method, 0))
    method.abandon()
    assert torch.equal(method.predict(x, 0), first)
    method.learn(digits[1], None, None)
    assert not torch.equal(method.predict(x, 0), first)
    torch.testing.assert_close(method.means(0), plain_means(method, 0))

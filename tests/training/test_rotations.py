"""Learning with rotations: each image in four turns, a turned class as one of its own."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import rankup
from helpers.calling import Call
from helpers.learning import F64, RATE, assert_agree
from helpers.zoo import GPU, assert_same_bits
from rankup.data.transforms import Permutation, Rotation, Scaling
from rankup.layers import TaskHead, TaskNorm
from rankup.testing import split_digits
from rankup.testing.setup import convnet
from rankup.training.batches import Draws, Feed
from rankup.training.checkpoint import Checkpoint
from rankup.training.class_means import nearest_mean
from rankup.training.engine.cuda_graph import Graph
from rankup.training.engine.eager import Eager
from rankup.training.engine.learner import Learner
from rankup.training.engine.mlp import ChainLearner
from rankup.training.engine.rank import RankLearner
from rankup.training.fit import NetPupil
from rankup.training.recipe import Recipe

CPU = torch.device("cpu")
RECIPE = Recipe(epochs=3, batch=32, rotations=True)


def colours(samples: int = 24, classes: int = 3, height: int = 6, width: int = 6) -> rankup.Task:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (samples, 3, height, width), generator=draw, dtype=torch.uint8)
    y = torch.arange(samples) % classes
    return rankup.Task("colours", classes, x, y, x[:6], y[:6])


def grown(**options: object) -> rankup.IncrementalNet:
    return rankup.grow(convnet(), rankup.Rank(4, 1), **options)


def head_of(net: rankup.IncrementalNet) -> TaskHead:
    (head,) = (layer for layer in net.layers if isinstance(layer, TaskHead))
    return head


def epoch(feed: Feed, seed: int = 0) -> Draws:
    return feed.sample_epoch(torch.Generator().manual_seed(seed))


def step(draws: Draws, number: int) -> Draws:
    return {name: entries[number] for name, entries in draws.items()}


def test_an_epoch_has_every_image_once_in_every_turn() -> None:
    feed = Feed(colours(), Recipe(batch=16, rotations=True), CPU)
    draws = epoch(feed)
    assert feed.steps_per_epoch == 6  # 24 images in 4 turns
    pairs = set(
        zip(draws["rows"].flatten().tolist(), draws["turns"].flatten().tolist(), strict=True)
    )
    assert pairs == {(row, turn) for row in range(24) for turn in range(4)}
    assert feed.x is feed.task.train_x  # which is in memory once


@pytest.mark.parametrize("scaling", [None, Scaling((0.5,), (0.25,))])
@pytest.mark.parametrize("others", [{}, {"flip": True, "crop": 2, "pixels": "centred"}])
def test_images_are_turned_after_flips_and_crops(
    scaling: Scaling | None, others: dict[str, object]
) -> None:
    task = replace(colours(), transform=scaling)
    turned = Feed(task, Recipe(batch=96, rotations=True, **others), CPU)
    draw = step(epoch(turned), 0)
    upright = Feed(task, Recipe(batch=96, **others), CPU)
    same = {name: t for name, t in draw.items() if name != "turns"}
    found, expected = turned.batch(turned.x, draw), upright.batch(upright.x, same)
    for image, before, turns in zip(found, expected, draw["turns"].tolist(), strict=True):
        assert_same_bits(image, torch.rot90(before, turns, (1, 2)))
    labels = task.train_y[draw["rows"]] + 3 * draw["turns"]
    assert torch.equal(turned.labels(task.train_y, draw), labels)


def test_replicas_get_the_batches_and_labels_that_each_has_alone() -> None:
    feed = Feed(colours(), Recipe(batch=16, rotations=True, flip=True), CPU)
    draws = [step(epoch(feed, seed), 0) for seed in range(2)]
    together = {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}
    x, y = torch.stack([feed.x, feed.x.flip(0)]), torch.stack([feed.task.train_y] * 2)
    for number, (draw, batch) in enumerate(zip(draws, feed.batch(x, together), strict=True)):
        assert torch.equal(batch, feed.batch(x[number], draw))
        assert torch.equal(feed.labels(y, together)[number], feed.labels(y[number], draw))


def test_batches_without_rotations_are_as_before() -> None:
    task = colours()
    drawn = epoch(Feed(task, Recipe(batch=16), CPU))
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    assert drawn.keys() == {"rows"}
    assert torch.equal(drawn["rows"].flatten()[:24], order)


def test_a_task_learned_with_rotations_answers_with_its_classes_and_keeps_their_rows() -> None:
    stream, net, upright = split_digits(3), grown(), grown()
    for task in stream:
        rankup.fit(net, task, RECIPE)
        rankup.fit(upright, task, replace(RECIPE, rotations=False))
    assert [rankup.accuracy(net, task) > 0.9 for task in stream] == [True] * 3
    assert net.size() == upright.size()  # nothing of turned classes is left
    assert head_of(net).added(1)["weight"].shape == (2, 48)


def test_rows_of_unturned_classes_are_those_that_stay() -> None:
    learned: dict[int, Tensor] = {}
    net, task = grown(), split_digits(1)[0]

    def look(*_: object) -> None:
        learned[0] = head_of(net).new_weight.detach().clone()

    rankup.fit(net, task, RECIPE, on_epoch=look)
    assert learned[0].shape == (8, 48)
    assert_same_bits(head_of(net).added(0)["weight"], learned[0][:2])


def test_turned_images_are_told_from_upright_ones() -> None:
    """What makes rotations more than augmentation."""
    net, task = grown(), split_digits(1)[0]
    pupil = NetPupil(net, replace(RECIPE, epochs=6), 0)
    seen: list[float] = []

    def look(*_: object) -> None:
        feed = Feed(task, RECIPE, CPU)
        right = [
            (net._run_for(0, x, {}).argmax(1) == y).float().mean()
            for x, y in feed.train_turned(200)
        ]
        seen.append(float(torch.stack(right).mean()))

    rankup.fit(net, task, pupil.recipe, on_epoch=look)
    assert seen[-1] > 0.8  # among 8 turned classes


@pytest.mark.parametrize("net", ["mlp", "convnet"])
def test_resumed_task_equals_uninterrupted_one(net: str) -> None:
    task, x = split_digits(1)[0], torch.rand(5, 1, 8, 8)
    recipe = replace(RECIPE, flip=True, crop=1, views=4)
    kept: list[Checkpoint] = []

    def made() -> rankup.IncrementalNet:
        module = convnet() if net == "convnet" else rankup.models.mlp(64, hidden=[16])
        return rankup.grow(module, rankup.Rank(4, 1))

    whole = rankup.fit(made(), task, recipe, on_epoch=lambda _, point: kept.append(point))
    resumed = rankup.fit(made(), task, recipe, resume=kept[0])
    assert_same_bits(whole.eval()(x, 0), resumed.eval()(x, 0))


def test_chain_takes_the_steps_that_autograd_takes() -> None:
    found = []
    for kind in (RankLearner, ChainLearner):
        net = rankup.grow(rankup.models.mlp(64, hidden=[16]).to(F64), rankup.Rank(3, 1))
        rankup.fit(net, split_digits(2)[0], replace(RECIPE, epochs=1))
        net.begin_task("open", 2, selectors="previous", rotations=True)
        learner = kind(net.train(), Feed(split_digits(2)[1], RECIPE, CPU, F64))
        assert (
            learner.projections is None
        )  # nothing is projected beforehand: images differ in every step
        steps, draws = Eager([learner]), epoch(learner.feed)
        losses = steps.epoch([draws], [[RATE] * learner.feed.steps_per_epoch], 0)
        steps.adopt()
        found.append((losses, [torch.cat([p.detach().flatten() for p in net.parameters()])]))
    assert_agree(*found)


def test_norms_take_statistics_of_all_turns() -> None:
    x = torch.rand(40, 1, 8, 8).cumsum(3)  # brighter on one side

    def statistics(x: Tensor, rotations: bool) -> Tensor:
        net = grown()
        net.begin_task("a", 2, rotations=rotations)
        net.commit_task(calibrate=[x])
        norm = next(layer for layer in net.layers if isinstance(layer, TaskNorm))
        return norm.added(0)["mean"]

    turned = torch.rot90(x, 1, (2, 3))
    torch.testing.assert_close(statistics(x, True), statistics(turned, True))
    assert not torch.allclose(statistics(x, False), statistics(turned, False), rtol=1e-3)
    assert not torch.allclose(statistics(x, True), statistics(x, False), rtol=1e-3)


def test_heads_start_from_means_of_turned_classes() -> None:
    net, task = grown(base="keep"), split_digits(1)[0]
    pupil = NetPupil(net, replace(RECIPE, head="means"), 0)
    pupil.open(task)
    feed, features = pupil.prepare(task), []
    with torch.no_grad():
        net.eval()
        hook = head_of(net).register_forward_pre_hook(lambda _, given: features.append(given[0]))
        labels = [y for x, y in feed.train_turned(4096) if net._run_for(0, x, {}) is not None]
        hook.remove()
    start = nearest_mean(torch.cat(features), torch.cat(labels), 8)
    assert start is not None
    torch.testing.assert_close(head_of(net).new_weight.detach(), start[0])


def _flat(task: rankup.Task) -> rankup.Task:
    return replace(task, train_x=task.train_x.flatten(1), test_x=task.test_x.flatten(1))


TURN, SHUFFLE = Rotation(30.0), Permutation(torch.arange(36))


@pytest.mark.parametrize(
    ("task", "why"),
    [
        (_flat(colours()), r"only images can be turned, \[N, C, H, W\], not .*uint8 \[24, 108\]"),
        (
            replace(
                _flat(colours()), train_x=torch.ones(24, 7).long(), test_x=torch.ones(6, 7).long()
            ),
            r"only images can be turned, .*int64 \[24, 7\]",
        ),
        (colours(height=4), "only square images can be turned, got 6×4 pixels"),
        (replace(colours(), transform=TURN), "its images are rotated already"),
        (replace(colours(), transform=SHUFFLE), "its images are permuted already"),
    ],
)
def test_what_cannot_be_turned_is_refused(task: rankup.Task, why: str) -> None:
    net = rankup.grow(rankup.models.mlp(108, hidden=[8]), rankup.Rank(2, 1))
    with pytest.raises(rankup.RankupError, match=f"'colours' cannot be learned .*: {why}"):
        rankup.fit(net, task, RECIPE)
    assert net.learning is None


def test_teachers_tasks_at_once_and_modules_without_logits_are_refused() -> None:
    task = split_digits(1)[0]
    teacher = rankup.fit(grown(), task, replace(RECIPE, rotations=False))
    with pytest.raises(rankup.RankupError, match="rotations need labels"):
        rankup.fit(grown(), task, RECIPE, teacher=teacher)
    with pytest.raises(rankup.RankupError, match="rotations are not for tasks learned at once"):
        rankup.fit_together(grown(base="keep"), [task], RECIPE)

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = nn.Linear(64, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.head(self.hidden(x.flatten(1)).relu())
            return y, y

    net = rankup.grow(Pair(), rankup.Rank(2, 1), head="head")
    with pytest.raises(rankup.RankupError, match=r"a tensor of logits, \[2, 8\] .* got tuple"):
        rankup.fit(net, task, RECIPE)
    assert net.learning is None


def test_views_are_refused_where_they_make_no_sense() -> None:
    with pytest.raises(rankup.RankupError, match="views must be 1 or 4, got 2"):
        Recipe(rotations=True, views=2)
    with pytest.raises(rankup.RankupError, match="views=4 needs rotations"):
        Recipe(views=4)
    with pytest.raises(rankup.RankupError, match="or with rotations 4, got 4"):
        grown().begin_task("a", 2, views=4)


def test_runs_learn_with_rotations_and_refuse_what_cannot(call: Call) -> None:
    short = {"epochs": 2, "tasks": 5, "width": 16}
    result = rankup.run("rank", "s-digits", rotations=True, views=4, **short)
    assert result.average_accuracy > 0.8
    assert result.forgetting == 0
    assert result.method.net.size().heads == 5 * 8 * 17  # of five tasks
    with pytest.raises(rankup.RankupError, match="for the method rank, ewc does not learn them"):
        rankup.run("ewc", "s-digits", rotations=True, **short)
    with pytest.raises(rankup.RankupError, match="its images are rotated already"):
        rankup.run("rank", "r-digits", rotations=True, epochs=1)
    refused = call("compare", "--stream", "p-digits", "--methods", "rank", "--rotations")
    assert refused.code == 1
    assert "its images are permuted already" in " ".join(refused.err.split())


@GPU
@pytest.mark.parametrize("net", ["mlp", "resnet18"])
def test_captured_steps_agree_with_eager_ones(net: str) -> None:
    device, recipe = torch.device("cuda"), replace(RECIPE, flip=True, crop=1)
    found = []
    for captured in (False, True):
        options = {"width": 4, "image_size": 8, "channels": 1}
        plain = rankup.models.mlp(64) if net == "mlp" else rankup.models.resnet18(**options)
        grown = rankup.grow(plain.to(F64), rankup.Rank(3, 1)).to(device)
        grown.begin_task("old", 2)
        grown.commit_task([torch.rand(16, 1, 8, 8, dtype=F64, device=device)])
        grown.begin_task("open", 2, selectors="previous", rotations=True)
        feed = Feed(split_digits(2)[1], recipe, device, F64)
        kind = ChainLearner if net == "mlp" else RankLearner
        learners: list[Learner] = [kind(grown.train(), feed, 16 if captured else 1)]
        steps = Graph("branches", learners, None) if captured else Eager(learners)
        if captured:
            steps.start(learners)
        draws = learners[0].sample_epoch(torch.Generator(device).manual_seed(0))
        losses = steps.epoch([draws], [[RATE] * feed.steps_per_epoch], 0)
        steps.adopt()
        found.append((losses, [torch.cat([p.detach().flatten() for p in grown.parameters()])]))
    assert_agree(*found)

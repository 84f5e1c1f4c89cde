"""A memory of earlier tasks, heads that keep learning, and steps that use both."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import rankup
from helpers.little import CLASSES, after, entry, little_stream, make, tasks
from rankup.data.streams import Stream, make_stream
from rankup.data.transforms import Augmentation, Rotation, augment
from rankup.layers import Start, TaskHead, active
from rankup.layers.spec import HeadSpec
from rankup.methods.shared.heads import FEATURES, LearningHeads
from rankup.methods.shared.replay import ReplayLearner, Slots, remembered, rows_by_class
from rankup.training.batches import Feed
from rankup.training.recipe import Recipe

CPU, F64 = torch.device("cpu"), torch.float64
# Methods with options for them.
REPLAY: dict[str, dict[str, Any]] = {
    "icarl": {"budget": 60},
    "agem": {},
    "er-ring": {},
    "der": {},
}


# Heads


def heads(classes: tuple[int, ...] = CLASSES) -> LearningHeads:
    made = LearningHeads(HeadSpec("head", 5, True), classes, 0, F64, CPU)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.dim()))
    return made


@pytest.mark.parametrize("classes", [CLASSES, (3, 3, 3)])
@pytest.mark.parametrize("between", [(), (2,)])
def test_a_sample_is_answered_by_its_own_tasks_head(
    classes: tuple[int, ...], between: tuple[int, ...]
) -> None:
    layer, draw = heads(classes), torch.Generator().manual_seed(0)
    x = torch.randn(20, *between, 5, dtype=F64, generator=draw)
    own = torch.randint(3, (20,), generator=draw)
    with active(own):
        mixed = layer(x)
    assert mixed.shape == (20, *between, max(classes))
    for sample, task, answer in zip(x, own.tolist(), mixed, strict=True):
        with active(task):
            alone = layer(sample[None])[0]
        torch.testing.assert_close(answer[..., : classes[task]], alone)
        assert (answer[..., classes[task] :] == -math.inf).all()


def test_each_head_learns_from_its_own_samples_alone() -> None:
    layer, draw = heads(), torch.Generator().manual_seed(0)
    x, own = torch.randn(8, 5, dtype=F64, generator=draw), torch.tensor([0, 2] * 4)
    labels = torch.tensor([0, 3, 1, 2, 2, 1, 0, 0])
    with active(own):
        torch.nn.functional.cross_entropy(layer(x), labels, reduction="sum").backward()
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad[layer.slices[1]], torch.zeros(2, 5, dtype=F64))
    for task in (0, 2):
        again = heads()
        with active(task):
            loss = torch.nn.functional.cross_entropy(
                again(x[own == task]), labels[own == task], reduction="sum"
            )
        loss.backward()
        rows = layer.slices[task]
        torch.testing.assert_close(layer.weight.grad[rows], again.weight.grad[rows])


def test_heads_start_as_those_that_do_not_go_on_learning() -> None:
    spec = HeadSpec("head", 5, True)
    learning = LearningHeads(spec, CLASSES, 7, torch.float32, CPU)
    plain = TaskHead(spec, 7, torch.float32, CPU)
    x = torch.rand(2, 5)
    for task, classes in enumerate(CLASSES):
        assert not any(p[learning.slices[task]].any() for p in learning.parameters())
        for layer in (learning, plain):
            layer.open(layer.start(classes, Start()))
            with torch.no_grad():
                added = layer.extended(layer.learned())
            layer.close()
            layer.install(added)
        with active(task):
            assert torch.equal(learning(x), plain(x))
    with active(FEATURES):
        assert learning(x) is x


def test_heads_start_fresh_despite_weight_decay(tmp_path: Any) -> None:
    stream = make_stream("p-digits", tasks=3)
    method = make("er-ring", stream, weight_decay=0.02, epochs=3)
    method.learn(stream[0], None, None)
    method.save(tmp_path)
    loaded = type(method).load(tmp_path, method.setting)
    for one in (method, loaded):
        one.begin(stream[1])
    for a, b in zip(method.body.parameters(), loaded.body.parameters(), strict=True):
        assert torch.equal(a, b)
    fresh = TaskHead(method.head.spec, 0, torch.float32, CPU)
    fresh.count = 1
    started = fresh.start(10, Start())["weight"]
    assert torch.equal(method.head.weight[10:20], started)


# The memory


def test_slots_go_by_task_and_class() -> None:
    slots = Slots(tasks(), 2)
    expected = [(t, c) for t, number in enumerate(CLASSES) for c in range(number) for _ in range(2)]
    found = list(zip(slots.tasks.tolist(), slots.labels.tolist(), strict=True))
    assert found == expected


def test_memory_keeps_transformed_bytes() -> None:
    stream = make_stream("p-digits", tasks=2)
    feed, rows = Feed(stream[1], Recipe(), CPU), torch.tensor([4, 0, 77])
    kept = remembered(feed, rows)
    assert kept.dtype == torch.uint8
    assert feed.fixed is not None
    assert torch.equal(kept, feed.fixed[rows])
    assert not torch.equal(kept, stream[1].train_x[rows])
    turned = Feed(replace(stream[0], transform=Rotation(30.0)), Recipe(), CPU)
    assert turned.fixed is not None
    assert remembered(turned, rows).dtype == torch.uint8
    seen = turned.fixed[rows] * 255
    torch.testing.assert_close(remembered(turned, rows).float(), seen, rtol=0, atol=0.501)


def test_floats_are_remembered_as_they_are() -> None:
    (task,) = tasks(3, dtype=torch.float32)
    rows = torch.tensor([5, 1])
    for transform in (None, Rotation(90.0)):
        feed = Feed(replace(task, transform=transform), Recipe(), CPU)
        assert feed.fixed is not None
        assert torch.equal(remembered(feed, rows), feed.fixed[rows])


class Brighter:
    def __call__(self, x: Tensor) -> Tensor:
        return x * 2

    def to(self, device: torch.device | str) -> "Brighter":
        return self


def test_values_outside_bytes_are_refused() -> None:
    feed = Feed(replace(tasks()[0], transform=Brighter()), Recipe(), CPU)
    with pytest.raises(rankup.RankupError, match="task '0' transforms bytes to values from 0"):
        remembered(feed, torch.arange(24))


@pytest.mark.parametrize("name", [*REPLAY, "orthog"])
def test_tasks_of_different_inputs_are_refused(name: str) -> None:
    first, second, _ = tasks()
    for what, x in {"dtype": second.train_x / 255, "shape": second.train_x.flatten(1)}.items():
        stream = Stream("odd", (first, replace(second, train_x=x, test_x=x)))
        with pytest.raises(rankup.RankupError, match=f"a memory needs .* same {what}, got torch"):
            make(name, stream, options=REPLAY.get(name))
    make("orthog", stream, options={"memory": 0})  # without a memory, nothing is mixed


def test_a_class_without_samples_is_refused() -> None:
    feed = Feed(replace(tasks()[0], classes=4), Recipe(), CPU)
    with pytest.raises(rankup.RankupError, match="task '0' has no training sample of class 3"):
        rows_by_class(feed, torch.arange(24))


def test_rows_go_by_class_in_the_order_given() -> None:
    task, order = tasks()[0], torch.randperm(24, generator=torch.Generator().manual_seed(0))
    found = [own.tolist() for own in rows_by_class(Feed(task, Recipe(), CPU), order)]
    assert found == [[r for r in order.tolist() if task.train_y[r] == c] for c in range(3)]


@pytest.mark.parametrize("name", ["agem", "er-ring"])
def test_memory_holds_each_class_in_slot_order(name: str) -> None:
    stream = little_stream()
    method = make(name, stream)
    learner = after(method, stream, 2)
    assert learner.held == 5 * (3 + 2)
    images = method.buffer["images"]
    assert torch.equal(learner.memory_x[:25], images)
    assert learner.memory_x.shape == (5 * sum(CLASSES), 1, 4, 4)
    for image, task, label in zip(images, learner.memory_tasks, learner.memory_y, strict=False):
        own = stream[int(task)]
        places = (own.train_x == image).flatten(1).all(1).nonzero().flatten()
        assert own.train_y[places].tolist() == [int(label)]
    assert len(images.unique(dim=0)) == 25
    assert method.footprint().buffer == 25 * 16 / 4


def test_small_classes_fill_their_places() -> None:
    first = tasks(2)[0]
    few = replace(first, train_x=first.train_x[:5], train_y=torch.tensor([0, 1, 1, 1, 1]))
    stream = Stream("few", (few, first))
    method = make("er-ring", stream)
    after(method, stream, 1)
    images = method.buffer["images"]
    assert torch.equal(images[:5], few.train_x[:1].expand(5, -1, -1, -1))
    assert len(images[5:].unique(dim=0)) == 4


# Steps


def shift(body: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in body.parameters():
            parameter.add_(0.01)


@pytest.mark.parametrize("held", [1, 6, 9])
@pytest.mark.parametrize("replay", [4, 6, 20])
def test_a_memory_is_gone_through_evenly(held: int, replay: int) -> None:
    task = tasks()[2]
    body, slots = torch.nn.Linear(16, 3), Slots(tasks(), 1)
    feed = Feed(task, Recipe(batch=5), CPU)
    learner = ReplayLearner(body, feed, 2, slots, task.train_x[:held], replay)
    drawn = learner.sample_epoch(torch.Generator().manual_seed(3))
    memory = drawn["memory"]
    assert memory.shape == (5, replay)
    times = memory.flatten().bincount(minlength=held)
    assert len(times) == held
    assert int(times.max() - times.min()) <= 1
    for step in memory:  # a step sees as much of it as fits
        assert len(step.unique()) == held or held > replay / 2
    # The task's own batches are those of one without a memory.
    assert torch.equal(drawn["rows"], feed.sample_epoch(torch.Generator().manual_seed(3))["rows"])
    again = learner.sample_epoch(torch.Generator().manual_seed(3))["memory"]
    other = learner.sample_epoch(torch.Generator().manual_seed(4))["memory"]
    assert torch.equal(memory, again)
    assert held == 1 or not torch.equal(memory, other)


@pytest.mark.parametrize("recipe", [{"flip": True, "crop": 1}, {"crop": 2}, {"flip": True}])
def test_replayed_images_are_augmented_like_others(recipe: dict[str, Any]) -> None:
    stream = little_stream(3, 3, 3, 3)
    learner = after(make("er-ring", stream, pixels="centred", **recipe), stream, 2)
    draw = entry(learner)
    x, y, own = learner.replayed(draw)
    assert len(x) == 64
    images = learner.memory_x[draw["memory"]].mul(1 / 255)
    drawn = Augmentation(draw["memory_coins"], draw["memory_offsets"])
    crop = recipe.get("crop", 0)
    assert torch.equal(x, augment(images, crop, drawn) * 2 - 1)
    assert not torch.equal(x, images * 2 - 1)
    assert draw["memory_coins"].any() == recipe.get("flip", False)
    assert int(draw["memory_offsets"].max()) == 2 * crop
    assert torch.equal(y, learner.memory_y[draw["memory"]])
    assert torch.equal(own, learner.memory_tasks[draw["memory"]])


def test_transformed_images_are_not_augmented_again() -> None:
    stream = make_stream("p-digits", tasks=2)
    learner = after(make("er-ring", stream, flip=True, pixels="raw"), stream, 1)
    draw = entry(learner)
    x = learner.replayed(draw).x
    torch.testing.assert_close(x, learner.memory_x[draw["memory"]].float())

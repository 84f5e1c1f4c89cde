"""Dark experience replay: a reservoir of samples and of what was answered to them while they were
learned, and steps that hold answers there."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.little import CLASSES, entry, gradient, little_stream, make
from rankup.data.streams import Stream, make_stream
from rankup.methods.der import DER, DERLearner
from rankup.testing import split_digits
from rankup.training.engine.eager import Eager

FIRST = (0, 3, 5)  # of each task's classes, among all


def begin(method: DER, stream: Stream, task: int) -> DERLearner:
    learner = method.begin(stream[task])
    assert isinstance(learner, DERLearner)
    return learner


def teach(method: DER, stream: Stream, tasks: int) -> None:
    """Learn tasks, well or not."""
    for task in range(tasks):
        learner = begin(method, stream, task)
        run(learner)
        method.end()


def run(learner: DERLearner, epochs: int = 3) -> list[dict[str, Tensor]]:
    """Take an epoch's steps a few times; what was drawn for each."""
    steps, drawn = Eager([learner]), []
    for epoch in range(epochs):
        draws = learner.sample_epoch(torch.Generator().manual_seed(epoch))
        count = len(draws["rows"])
        steps.epoch([draws], [[0.1] * count], epoch)
        drawn += [{name: t[step] for name, t in draws.items()} for step in range(count)]
    steps.adopt()
    return drawn


def all_answers(learner: DERLearner, x: Tensor) -> Tensor:
    """A plain MLP's answers from all heads."""
    body: Any = learner.body
    x = x.flatten(1).float() / 255
    for layer in body.hidden:
        x = torch.relu(x @ layer.weight.T + layer.bias)
    return x @ body.head.weight.T + body.head.bias


def samples(method: DER, learner: DERLearner, stream: Stream, places: Tensor) -> list[Any]:
    """What is in some slots: image, label, task and stored logits."""
    task, found = method.learned, []
    for place in (places * min(int(learner.seen), method.size)).long().tolist():
        row, logits = int(learner.memory_rows[place]), learner.memory_logits[place].tolist()
        if row >= 0:
            found.append((stream[task].train_x[row], int(stream[task].train_y[row]), task, logits))
        else:
            one = int(method.buffer["classes"][place])
            owner = max(t for t in range(3) if FIRST[t] <= one)
            found.append((method.buffer["images"][place], one - FIRST[owner], owner, logits))
    return found


@pytest.mark.parametrize("among", ["own", "all"])
@pytest.mark.parametrize("labels", [0.0, 0.5])
def test_loss_is_the_papers(labels: float, among: str) -> None:
    stream = little_stream()
    options = {"replay": 8, "strength": 0.7, "labels": labels, "among": among, "memory": 2}
    method = make("der", stream, options=options)
    teach(method, stream, 2)
    learner = begin(method, stream, 2)
    drawn = run(learner, 1)  # the reservoir now holds samples of the open task, too
    draw = drawn[1]

    def logits(x: Tensor, task: int) -> Tensor:
        own = slice(FIRST[task], FIRST[task] + CLASSES[task])
        return all_answers(learner, x[None])[0][slice(None) if among == "all" else own]

    def surprise(x: Tensor, y: int, task: int) -> Tensor:
        right = y + (FIRST[task] if among == "all" else 0)
        return -logits(x, task).log_softmax(0)[right]

    held = samples(method, learner, stream, draw["places"])
    assert {task for _, _, task, _ in held} == {0, 1, 2}
    own = stream[2]
    expected = torch.stack(
        [surprise(own.train_x[r], int(own.train_y[r]), 2) for r in draw["rows"].tolist()]
    ).mean()
    apart = [
        sum((z - w) ** 2 for z, w in zip(now, stored, strict=False)) / len(now)
        for x, _, task, stored in held[:8]
        for now in [logits(x, task)]
    ]
    expected = expected + 0.7 * sum(apart) / 8
    assert len(held) == (16 if labels else 8)
    for x, y, task, _ in held[8:]:
        expected = expected + labels * surprise(x, y, task) / 8
    loss, grads = gradient(learner, draw)
    torch.testing.assert_close(loss, expected)
    wanted = torch.autograd.grad(expected, list(learner.body.parameters()), materialize_grads=True)
    for found, plain in zip(grads, wanted, strict=True):
        torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-6)


def test_first_step_has_nothing_to_replay() -> None:
    stream = little_stream()
    method = make("der", stream, options={"labels": 0.5})
    learner = begin(method, stream, 0)
    draw = entry(learner)
    x, y = stream[0].train_x[draw["rows"]], stream[0].train_y[draw["rows"]]
    plain = F.cross_entropy(all_answers(learner, x)[:, :3], y)
    torch.testing.assert_close(gradient(learner, draw)[0], plain)
    assert int(learner.seen) == len(y)


@pytest.mark.parametrize("memory", [1, 4])
def test_reservoir_is_vitters(memory: int) -> None:
    """Against a plain loop over all samples, one by one, that stores what each was answered."""
    stream = little_stream()
    method = make("der", stream, options={"memory": memory, "replay": 4}, batch=7)
    size, number = memory * sum(CLASSES), 0
    expected: list[Any] = [None] * size
    for task in range(3):
        learner = begin(method, stream, task)
        steps = Eager([learner])
        for epoch in range(3):
            draws = learner.sample_epoch(torch.Generator().manual_seed(epoch))
            for step in range(len(draws["rows"])):
                one = {name: entries[step : step + 1] for name, entries in draws.items()}
                x = stream[task].train_x[one["rows"][0]]
                with torch.no_grad(), learner.bound(steps.tensors[0]):
                    answers = all_answers(learner, x)[:, FIRST[task] : FIRST[task] + CLASSES[task]]
                rows, chances = one["rows"][0].tolist(), one["chances"][0].tolist()
                for row, chance, logits in zip(rows, chances, answers, strict=True):
                    place = number if number < size else int(chance * (number + 1))
                    if place < size:
                        label = int(stream[task].train_y[row])
                        expected[place] = stream[task].train_x[row], FIRST[task] + label, logits
                    number += 1
                steps.epoch([one], [[0.1]], 0)
        steps.adopt()
        method.end()
    held = method.buffer
    assert int(held["seen"]) == number == 3 * 3 * 28  # a fourth batch is filled up
    assert torch.equal(held["images"], torch.stack([image for image, _, _ in expected]))
    assert held["classes"].tolist() == [label for _, label, _ in expected]
    for stored, (_, _, logits) in zip(held["logits"], expected, strict=True):
        torch.testing.assert_close(stored[: len(logits)], logits)
        assert not stored[len(logits) :].any()  # of classes that its task does not have


def test_every_sample_is_held_with_the_same_probability() -> None:
    stream, size = little_stream(), 9
    method = make("der", stream, options={"memory": 1}, batch=12)
    learner, times = begin(method, stream, 0), torch.zeros(120)
    draw, trials = torch.Generator().manual_seed(0), 800
    for _ in range(trials):
        learner.seen.zero_()
        for first in range(0, 120, 12):
            rows = torch.arange(first, first + 12)
            chances = torch.rand(12, generator=draw, dtype=torch.float64)
            learner._offer({"rows": rows, "chances": chances}, torch.zeros(12, 4))
        held = learner.memory_rows[:size]
        assert len(held.unique()) == size
        times[held] += 1
    expected = trials * size / 120
    assert float((times - expected).abs().max()) < 4.5 * expected**0.5
    thirds = times.view(3, 40).sum(1)  # the first samples as often as the last
    assert float((thirds / thirds.mean() - 1).abs().max()) < 0.06


def test_the_same_seed_holds_the_same() -> None:
    stream, held = make_stream("s-digits", tasks=2), []
    for seed in (0, 0, 1):
        method = make("der", stream, options={"memory": 3}, seed=seed, epochs=4)
        for task in stream:
            method.learn(task, None, None)
        held.append(method.buffer)
    assert all(torch.equal(held[0][name], held[1][name]) for name in held[0])
    assert not torch.equal(held[0]["images"], held[2]["images"])


@pytest.mark.parametrize("name", ["s-digits", "p-digits"])
def test_images_are_kept_as_they_were_before_augmentation(name: str) -> None:
    stream = make_stream(name, tasks=2)
    method = make("der", stream, options={"memory": 2}, crop=1, lr=0.05, epochs=6)
    for task in stream:
        method.learn(task, None, None)
    assert method.buffer["images"].dtype == torch.uint8
    given = set()
    for task in stream:
        x = task.train_x if task.transform is None else task.transform(task.train_x)
        given |= {tuple(image.flatten().tolist()) for image in x}
    assert all(tuple(image.flatten().tolist()) in given for image in method.buffer["images"])
    starts = method.logits.starts.tolist()
    owners = {sum(start <= one for start in starts) for one in method.buffer["classes"].tolist()}
    assert owners == {1, 2}


def test_a_replayed_sample_of_the_open_task_is_augmented_like_its_batch() -> None:
    stream = little_stream()
    method = make("der", stream, options={"replay": 6}, crop=1, flip=True)
    learner = begin(method, stream, 0)
    run(learner, 1)
    draw = entry(learner)
    places = torch.arange(6)
    rows = learner.memory_rows[places]
    found = learner.replayed({**draw, "memory": places})
    drawn = {"coins": draw["memory_coins"], "offsets": draw["memory_offsets"], "rows": rows}
    assert torch.equal(found.x, learner.feed.batch(learner.x, drawn))
    assert not torch.equal(found.x, stream[0].train_x[rows] / 255)
    assert torch.equal(found.y, stream[0].train_y[rows])


def test_among_all_classes_tells_tasks_apart() -> None:
    stream, right = split_digits(3), {}
    for among in ("own", "all"):
        options = {"memory": 20, "labels": 0.5, "among": among}
        method = make("der", stream, options=options, epochs=15)
        for task in stream:
            method.learn(task, None, None)
        found = [method.untold(task.test_x.float() / 255).logits.argmax(1) for task in stream]
        wanted = [task.test_y + 2 * index for index, task in enumerate(stream)]
        right[among] = float((torch.cat(found) == torch.cat(wanted)).float().mean())
    assert right["all"] > 0.85
    assert right["all"] > right["own"] + 0.1

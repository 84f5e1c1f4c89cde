"""All tasks are learned at once, every sample by its own task's head."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import rankup
from helpers.runs import config_for
from helpers.zoo import GPU
from rankup.data.streams import Stream, make_stream
from rankup.data.tasks import Task
from rankup.data.transforms import Permutation, Rotation, transform_each
from rankup.methods import METHODS
from rankup.methods.multitask import Union
from rankup.runs.records import read_lines
from rankup.runs.run import run, run_together
from rankup.runs.seed_run import SeedRun
from rankup.testing import make_method
from rankup.training.batches import Feed
from rankup.training.engine.cuda_graph import Graph
from rankup.training.engine.eager import Eager
from rankup.training.evaluate import training_accuracy, why_not_learned
from rankup.training.recipe import Recipe

CPU = torch.device("cpu")
STREAMS = ["p-digits", "r-digits", "s-digits"]


def make(stream: Stream, single_head: bool = False, device: str = "cpu", **recipe: object) -> Any:
    module, options = rankup.models.mlp(64, hidden=[16]).to(device), {"single_head": single_head}
    return make_method("multitask", stream, module, options=options, **{"epochs": 2, **recipe})


def tasks_of(stream: str) -> Stream:
    return make_stream(stream, tasks=None if stream == "s-digits" else 3)


def unequal() -> Stream:
    """Tasks of 3, 2 and 4 classes and of different lengths."""
    draw, tasks = torch.Generator().manual_seed(0), []
    for number, (classes, samples) in enumerate([(3, 60), (2, 40), (4, 100)]):
        y = torch.arange(samples) % classes
        centres = torch.rand(classes, 1, 8, 8, generator=draw)
        x = 0.8 * centres[y] + 0.2 * torch.rand(samples, 1, 8, 8, generator=draw)
        tasks.append(Task(f"{number}", classes, x, y, x, y))
    return Stream("unequal", tuple(tasks))


@pytest.mark.parametrize("augmented", [False, True])
@pytest.mark.parametrize("name", STREAMS)
def test_batch_holds_samples_as_their_tasks_make_them(name: str, augmented: bool) -> None:
    stream = tasks_of(name)
    recipe = Recipe(batch=100, pixels="centred", flip=augmented, crop=2 * augmented)
    union = Union(stream.tasks, recipe, CPU, torch.float32, one_label=False)
    drawn = union.sample_epoch(torch.Generator().manual_seed(1))
    draw = {key: entries[3] for key, entries in drawn.items()}
    batch = union.batch(union.x, draw)
    feeds = [Feed(task, recipe, CPU) for task in stream]
    starts = [0] * len(stream)  # of tasks that share their images
    if name == "s-digits":
        starts = [sum(len(f) for f in feeds[:n]) for n in range(len(feeds))]
    for number, task in enumerate(draw["tasks"].tolist()):
        feed, row = feeds[task], draw["rows"][number] - starts[task]
        own = {key: draw[key][number, None] for key in ("coins", "offsets") if key in draw}
        expected = feed.batch(feed.x, {"rows": row[None], **own})
        assert torch.equal(batch[number], expected[0])
        assert int(draw["labels"][number]) == int(feed.task.train_y[row])
    assert set(draw["tasks"].tolist()) == set(range(len(stream)))  # a mixed batch


@pytest.mark.parametrize("name", STREAMS)
def test_samples_are_of_all_tasks(name: str) -> None:
    stream, recipe = tasks_of(name), Recipe(pixels="centred", flip=True)
    union = Union(stream.tasks, recipe, CPU, torch.float32, one_label=False)
    found = torch.cat([*union.sample(10_000, torch.Generator().manual_seed(0))])
    feeds = [Feed(task, recipe, CPU) for task in stream]
    wanted = torch.cat([x for feed in feeds for x, _ in feed.train(len(feed))])
    order = torch.randperm(len(union), generator=torch.Generator().manual_seed(0))
    assert torch.equal(found, wanted[order[:10_000]])
    (few,) = union.sample(5, torch.Generator().manual_seed(0))
    assert torch.equal(few, found[:5])


@pytest.mark.parametrize("stream", [make_stream("s-digits"), make_stream("r-digits", tasks=2)])
def test_an_epoch_is_one_pass_over_all_tasks(stream: Stream) -> None:
    union = Union(stream.tasks, Recipe(batch=64), CPU, torch.float32, one_label=False)
    total = sum(len(task.train_y) for task in stream)
    assert len(union) == total
    assert union.steps_per_epoch == math.ceil(total / 64)
    drawn = union.sample_epoch(torch.Generator().manual_seed(0))
    seen = torch.stack([drawn["tasks"], drawn["rows"]], -1).flatten(0, 1)
    assert drawn["rows"].shape == (union.steps_per_epoch, 64)
    assert len(seen[:total].unique(dim=0)) == total


def test_shared_images_are_held_once() -> None:
    stream = make_stream("r-digits", tasks=3)
    method = make(stream, epochs=4)
    learner = method.begin(stream[0])
    union = learner.feed
    assert union.x.data_ptr() == stream[0].train_x.data_ptr()
    assert union.x.dtype == torch.uint8
    why_not_learned(method, union)
    method.abandon()
    for feed in (union, *union.parts):
        floats = [t for t in vars(feed).values() if isinstance(t, Tensor) and t.is_floating_point()]
        assert floats == []


def test_transforms_of_any_kind_go_by_sample() -> None:
    class Negative:
        def __call__(self, x: Tensor) -> Tensor:
            return 1 - x

    transforms = [Permutation(torch.randperm(64)), None, Rotation(30.0), Negative()]
    x, which = torch.rand(50, 1, 8, 8), torch.randint(4, (50,))
    each = transform_each(transforms, x)
    assert each is not None
    for image, number, found in zip(x, which.tolist(), each(x, which), strict=True):
        transform = transforms[number]
        expected = image if transform is None else transform(image[None])[0]
        assert torch.equal(found, expected)
    assert transform_each([None, None], x) is None


@pytest.mark.parametrize("loss", ["cross-entropy", "mse"])
@pytest.mark.parametrize("single_head", [False, True])
def test_every_sample_is_answered_by_its_own_head(single_head: bool, loss: str) -> None:
    stream = unequal()
    method = make(stream, single_head, loss=loss)
    learner = method.begin(stream[0])
    with torch.no_grad():
        method.head.bias.normal_(generator=torch.Generator().manual_seed(0))
    drawn = learner.sample_epoch(torch.Generator().manual_seed(0))
    draw = {key: entries[0] for key, entries in drawn.items()}
    ends = [0, 3, 5, 9]
    x = learner.feed.batch(learner.feed.x, draw).flatten(1)
    hidden = torch.relu(method.body.hidden[0](x))
    losses = []
    for features, task, label in zip(hidden, draw["tasks"], draw["labels"], strict=True):
        own = slice(None) if single_head else slice(ends[task], ends[task + 1])
        logits = method.head.weight[own] @ features + method.head.bias[own]
        if loss == "cross-entropy":
            losses.append(F.cross_entropy(logits, label))
        else:
            losses.append(((logits.softmax(0) - F.one_hot(label, len(logits))) ** 2).mean())
    torch.testing.assert_close(learner(draw), torch.stack(losses).mean())
    names = list(learner.learned())
    with learner.bound({}):
        found = learner.gradient(draw)[1]
    expected = torch.autograd.grad(torch.stack(losses).mean(), list(learner.learned().values()))
    for name, one, other in zip(names, found, expected, strict=True):
        torch.testing.assert_close(one, other, msg=name)


def test_all_heads_start_orthonormal() -> None:
    method = make(unequal())
    assert not method.head.weight.any()
    method.begin(method.setting.tasks[0])
    for own in method.head.slices:
        block = method.head.weight[own].detach()
        torch.testing.assert_close(block @ block.T, torch.eye(len(block)))
    assert len(method.head.weight.detach().unique(dim=0)) == 9
    assert method.learned == 0
    method.abandon()
    assert not method.head.weight.any()


def test_single_head_competes_with_all_classes() -> None:
    stream = unequal()
    method = make(stream, single_head=True, epochs=10)
    method.learn(stream[0], None, None)
    with torch.no_grad():  # so that many answers lie in other tasks
        method.head.weight.add_(
            0.5 * torch.randn(9, 16, generator=torch.Generator().manual_seed(3))
        )
    ends, wrong = [0, 3, 5, 9], 0
    for index, task in enumerate(stream):
        answers = method.predict(task.test_x, index)
        with torch.no_grad():
            hidden = torch.relu(method.body.hidden[0](task.test_x.flatten(1)))
            logits = hidden @ method.head.weight.T + method.head.bias
        right = logits.argmax(1) == task.test_y + ends[index]
        assert torch.equal(answers.argmax(1) == task.test_y, right)
        torch.testing.assert_close(answers[:, :-1], logits[:, ends[index] : ends[index + 1]])
        inside = logits[:, ends[index] : ends[index + 1]].argmax(1) == task.test_y
        wrong += int((inside & ~right).sum())
    assert wrong > 0  # some of which the task's own head would have got right


def test_a_single_head_of_one_task_has_no_others() -> None:
    stream = Stream("one", unequal().tasks[:1])
    method = make(stream, single_head=True)
    method.begin(stream[0])
    assert method.predict(stream[0].test_x, 0).shape == (60, 3)


@pytest.mark.parametrize("single_head", [False, True])
def test_the_verdict_is_on_all_tasks(single_head: bool) -> None:
    stream = unequal()
    method = make(stream, single_head)
    learner = method.begin(stream[0])
    feed, right, shares = learner.feed, [], []
    for index, task in enumerate(stream):
        answers = method.predict(task.train_x, index).argmax(1)
        right.append(float((answers == task.train_y).float().mean()))
        shares.append(float(task.train_y.bincount().max()) / len(task.train_y))
    assert training_accuracy(method, feed, 10_000) == pytest.approx(sum(right) / 3)
    assert feed.guess() == pytest.approx((max(shares) if single_head else sum(shares)) / 3)
    assert "'all 3 tasks' was not learned" in str(why_not_learned(method, feed))


def test_single_head_is_judged_by_its_own_guessing() -> None:
    """Even if it is below what guessing within a task would get."""
    stream = make_stream("s-digits")
    method = make(stream, single_head=True)
    feed = method.begin(stream[0]).feed

    def three_in_ten(x: Tensor, task: int) -> Tensor:
        right = torch.arange(len(x)) % 10 < 3
        classes = torch.where(right, stream[task].train_y, 2)  # 2: another task's
        return F.one_hot(classes, 3)

    method.predict = three_in_ten  # type: ignore[method-assign]
    assert training_accuracy(method, feed, 10_000) == pytest.approx(0.3, abs=0.01)
    assert all(part.guess() > 0.5 for part in feed.parts)
    assert why_not_learned(method, feed) is None


def test_a_run_learns_once_and_tells_of_every_task(tmp_path: Path) -> None:
    stream = make_stream("p-digits", tasks=3)
    assert not METHODS["multitask"].continual
    told: list[int] = []
    config = config_for(stream, "multitask", epochs=3)
    run(config, stream, tmp_path / "a", on_progress=lambda p: told.append(p.task))
    assert set(told) == {0}
    rows = [line["accuracy"] for line in read_lines(tmp_path / "a")]
    assert [len(row) for row in rows] == [1, 2, 3]
    assert rows[2][:2] == rows[1]
    assert rows[1][:1] == rows[0]
    assert min(rows[2]) > 0.4

    # One that was stopped before the last lines were written goes on without learning.
    lines = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a" / "metrics.jsonl").write_text(lines[0])
    again = SeedRun(config, stream, tmp_path / "a", resume=True)
    assert again.method.learned == 3
    told.clear()
    run_together([again], on_progress=lambda p: told.append(p.task))
    assert not told
    assert [line["accuracy"] for line in read_lines(tmp_path / "a")] == rows


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda x: x.double(), "the same dtype, got torch.float32 in '0' and torch.float64 in '1'"),
        (lambda x: x[..., :4], "inputs have the same shape, got torch.Size"),
    ],
)
def test_tasks_of_different_inputs_are_refused(change: object, found: str) -> None:
    first, second, _ = unequal().tasks
    other = replace(second, train_x=change(second.train_x), test_x=change(second.test_x))
    with pytest.raises(rankup.RankupError, match=found):
        make(Stream("odd", (first, other)))


@GPU
@pytest.mark.parametrize("name", STREAMS)
def test_captured_steps_agree_with_steps_one_by_one(name: str) -> None:
    stream = tasks_of(name).to("cuda")
    device, found = torch.device("cuda"), []
    for captured in (False, True):
        method = make(stream, device="cuda", flip=True, crop=1)
        learner = method.begin(stream[0])
        steps = Graph("branches", [learner], None) if captured else Eager([learner])
        if captured:
            steps.start([learner])
        drawn = learner.sample_epoch(torch.Generator(device).manual_seed(0))
        rates = [2.0**-9] * 10 + [0.0] * (learner.feed.steps_per_epoch - 10)
        losses = steps.epoch([drawn], [rates], 0)
        steps.adopt()
        found.append((losses, [p.detach().clone() for p in learner.parameters()]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=0)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)

"""Experience replay: steps on old and new samples together, from a memory that is first in, first
out."""

from collections import deque

import pytest
import torch
from torch import Tensor

from helpers.little import after, cross_entropies, entry, gradient, little_stream, make
from rankup.data.streams import Stream, make_stream
from rankup.methods.base import Method


def watched(method: Method) -> list[Tensor]:
    """The rows that training draws from here on, in order."""
    drawn: list[Tensor] = []
    begin = method.learner

    def learner(feed):
        made = begin(feed)
        draws = made.sample_epoch

        def noted(generator):
            found = draws(generator)
            drawn.extend(found["rows"].flatten())
            return found

        made.sample_epoch = noted
        return made

    method.learner = learner
    return drawn


@pytest.mark.parametrize("memory", [1, 3])
def test_the_memory_is_first_in_first_out(memory: int) -> None:
    stream = make_stream("s-digits")
    method = make("er-ring", stream, options={"memory": memory}, epochs=3)
    expected = []
    for task in stream.tasks[:2]:
        drawn = watched(method)
        method.learn(task, None, None)
        del method.learner
        rings = [deque(maxlen=memory) for _ in range(task.classes)]
        assert len(drawn) >= 3 * len(task.train_y)
        for row in drawn:
            rings[int(task.train_y[row])].append(task.train_x[row])
        expected += [image for ring in rings for image in ring]
    assert torch.equal(method.buffer["images"], torch.stack(expected))


def test_step_is_on_both_batches_together() -> None:
    stream = little_stream(3, 2, 4, 2)
    learner = after(make("er-ring", stream, options={"replay": 8}), stream, 2)
    draw = entry(learner)
    loss, grads = gradient(learner, draw)
    each = [cross_entropies(learner, *b) for b in (learner.current(draw), learner.replayed(draw))]
    assert [len(losses) for losses in each] == [16, 8]
    plain = torch.cat(each).mean()
    torch.testing.assert_close(loss, plain)
    expected = torch.autograd.grad(plain, list(learner.body.parameters()))
    for found, own in zip(grads, expected, strict=True):
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-6)


def test_unused_heads_have_no_gradient() -> None:
    stream = little_stream(3, 2, 4, 2)
    learner = after(make("er-ring", stream, options={"replay": 8}), stream, 2)
    draw = entry(learner)
    draw["memory"] = draw["memory"] % 15  # of the first task alone
    assert set(learner.replayed(draw).tasks.tolist()) == {0}
    names = [name.removeprefix("body.head.") for name in learner.learned()]
    found = dict(zip(names, gradient(learner, draw)[1], strict=True))
    for key in ("weight", "bias"):
        seen = [bool(found[key][rows].any()) for rows in learner.body.head.slices]
        assert seen == [True, False, True, False]


def test_the_first_task_is_learned_as_without_a_memory() -> None:
    stream: Stream = make_stream("s-digits")
    sgd = {"optimiser": "sgd", "lr": 0.1, "schedule": "constant"}
    replaying, plain = make("er-ring", stream), make("finetune", stream, **sgd)
    for method in (replaying, plain):
        method.learn(stream[0], None, None)
    x = stream[0].test_x.float() / 255
    torch.testing.assert_close(replaying.predict(x, 0), plain.predict(x, 0), rtol=1e-4, atol=1e-5)

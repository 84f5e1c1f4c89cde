"""Small tasks, answers, and checks that a step can be captured, for tests of methods."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import rankup
from helpers.zoo import module
from rankup.data.streams import Stream
from rankup.data.tasks import Task
from rankup.layers import Tensors
from rankup.methods.base import Method
from rankup.methods.shared.dense import DenseMethod
from rankup.training.batches import Draws, Feed
from rankup.training.engine.learner import Learner

Inputs = tuple[Tensors, Tensors, Draws]


KINDS = {"mlp": (64,), "convolutions": (3, 9, 9)}  # of networks, with a sample's shape


def net(kind: str) -> nn.Module:
    return rankup.models.mlp(64, hidden=[24, 16]) if kind == "mlp" else module(kind)


def toys(*shape: int, count: int = 3, classes: int = 3, samples: int = 96) -> list[Task]:
    """Tasks that are quickly learned: each class is noise around a picture of its own."""
    tasks = []
    for seed in range(count):
        draw = torch.Generator().manual_seed(seed)
        y = torch.arange(samples) % classes
        x = torch.rand(classes, *shape, generator=draw)[y]
        x = x + 0.2 * torch.rand(samples, *shape, generator=draw)
        tasks.append(Task(f"{seed}", classes, x, y, x, y))
    return tasks


def right(method: Method, task: Task, index: int) -> float:
    """The share of right answers."""
    return float((answer(method, task, index).argmax(1) == task.test_y).float().mean())


def answer(method: Method, task: Task, index: int) -> Tensor:
    with torch.no_grad():
        return method.predict(task.test_x, index)


def answers(method: DenseMethod, stream: Stream) -> list[Tensor]:
    """Answers for all learned tasks."""
    feeds = [Feed(task, method.recipe, method.device) for task in stream.tasks[: method.learned]]
    with torch.no_grad():
        return [method.predict(next(feed.test())[0], task) for task, feed in enumerate(feeds)]


def commit_drawn(method: Method, task: Task) -> None:
    """Commit a task whose parameters were not learned but drawn."""
    draw = torch.Generator().manual_seed(method.learned)
    learned = method.begin(task).learned()
    with torch.no_grad():
        for parameter in learned.values():
            parameter.normal_(generator=draw)
    method.end()


def same(before: list[Tensor], after: list[Tensor]) -> bool:
    assert before
    return all(torch.equal(one, other) for one, other in zip(before, after, strict=False))


def step(learner: Learner, learned: Tensors, read: Tensors, draw: Draws) -> tuple[Tensors, Tensor]:
    """Gradients and loss of one step on these tensors, as the engine computes them for replicas."""

    def loss(learned: Tensors) -> Tensor:
        answer: Tensor = functional_call(learner, read | learned, (draw,))
        return answer

    return grad_and_value(loss)(learned)


def inputs(learner: Learner, seed: int = 0) -> Inputs:
    drawn = learner.sample_epoch(torch.Generator().manual_seed(seed))
    learned = {name: tensor.detach().clone() for name, tensor in learner.learned().items()}
    return learned, learner.step_inputs(), {name: entries[0] for name, entries in drawn.items()}


class Unwaiting(TorchDispatchMode):
    """Refuses operations that would wait for a GPU or whose shapes depend on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.name().split("::")[1] not in (
            "_local_scalar_dense",
            "nonzero",
            "masked_select",
            "unique_dim",
            "_unique2",
            "is_nonzero",
        ), func
        return func(*args, **(kwargs or {}))


def assert_replicas_are_the_learners_alone(methods: list[Method], task: Task) -> None:
    learners = [method.begin(task) for method in methods]
    assert {learner.replicas for learner in learners} == {"vmap"}
    apart = [inputs(learner, seed) for seed, learner in enumerate(learners)]
    stacked = [
        {name: torch.stack([each[part][name] for each in apart]) for name in apart[0][part]}
        for part in range(3)
    ]
    together = vmap(lambda *tensors: step(learners[0], *tensors))(*stacked)
    for number, (learner, tensors) in enumerate(zip(learners, apart, strict=True)):
        grads, loss = step(learner, *tensors)
        torch.testing.assert_close(together[1][number], loss)
        for name, grad in grads.items():
            torch.testing.assert_close(together[0][name][number], grad, rtol=1e-4, atol=1e-6)

"""Steps as a captured graph takes them: the next task's tensors, several seeds, no waiting."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankup
from helpers.replayed import Replayed
from helpers.rivals import (
    Unwaiting,
    answer,
    assert_replicas_are_the_learners_alone,
    right,
    toys,
)
from helpers.zoo import GPU
from rankup import kernels, seeds
from rankup.data.streams import Stream
from rankup.methods import METHODS
from rankup.methods.base import Method
from rankup.testing import make_method
from rankup.training.engine.cuda_graph import Graph
from rankup.training.engine.eager import Eager, Steps
from rankup.training.engine.select import Engine, _signature
from rankup.training.loop import learn

NAMES = [name for name in METHODS if name != "rank"]  # whose learner has tests of its own
CONTINUAL = [name for name in NAMES if METHODS[name].continual]
# The first task has nothing to hold or to replay, so it has a graph of its own.
FIRST_APART = {"ewc", "icarl", "agem", "er-ring", "orthog", "nscl", "gpm"}
# All others must not be mapped over: they change tensors in place or take gradients themselves.
MAPPED = ["finetune", "ewc", "icarl", "er-ring", "supsup", "ibpwf", "vera", "randlora", "parallel"]
OPTIONS: dict[str, dict[str, Any]] = {
    "icarl": {"budget": 18},  # as many for one, two and three tasks of three classes
    "ibpwf": {"dictionary": 32, "alpha": 6.0},
    "ewc": {"samples": 20},
    "orthog": {"stiefel": "yes"},
}
STREAM = Stream("toys", tuple(toys(1, 6, 6, count=4, samples=48)))
NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: rankup.models.mlp(36, hidden=[24, 16]),
    "convnet": lambda: nn.Sequential(
        *(nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU()),
        *(nn.Conv2d(6, 8, 3, 2, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(8, 10)),
    ),
}


def make(name: str, net: str = "mlp", learned: int = 0, device: str = "cpu", **more: Any) -> Any:
    """A method that knows some tasks, whose steps were skipped."""
    method = make_method(
        name,
        STREAM.to(device),
        NETS[net]().to(device),
        options=OPTIONS.get(name, {}),
        **{"batch": 16, "epochs": 2, **more},
    )
    for task in STREAM.to(device).tasks[:learned]:
        method.begin(task)
        method.end()
    return method


def train(steps: Steps) -> Tensor:
    (learner,) = steps.learners
    feed = learner.feed
    for epoch in range(feed.recipe.epochs):
        draws = learner.sample_epoch(seeds.generator(epoch, device=feed.device))
        steps.on_epoch_start(epoch)
        losses = steps.epoch([draws], [[2.0**-7] * feed.steps_per_epoch], epoch)
    steps.adopt()
    return losses


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", [name for name in CONTINUAL if name != "parallel"])
def test_steps_of_one_task_serve_the_next(name: str, net: str) -> None:
    plain, replayed = make(name, net, learned=1), make(name, net)
    signatures, steps = [_signature(replayed.begin(STREAM[0]))], None
    replayed.end()
    for task in STREAM.tasks[1:3]:
        train(Eager([plain.begin(task)]))
        learner = replayed.begin(task)
        signatures.append(_signature(learner))
        steps = steps or Replayed(learner)
        steps.start(learner)
        train(steps)
        for method in (plain, replayed):
            method.end()
    assert signatures[1] == signatures[2]
    assert (signatures[0] != signatures[1]) == (name in FIRST_APART)
    assert _signature(make(name, net, learned=1).begin(STREAM[1])) != signatures[1]
    for index, task in enumerate(STREAM.tasks[:3]):
        one, other = (answer(method, task, index) for method in (plain, replayed))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("augmented", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_steps_never_wait_for_the_device(name: str, augmented: bool) -> None:
    recipe = {"flip": True, "crop": 1} if augmented else {}
    for learned in (0, 2) if METHODS[name].continual else (0,):
        learner = make(name, "convnet", learned, **recipe).begin(STREAM[learned])
        drawn = learner.sample_epoch(torch.Generator().manual_seed(0))
        draw = {key: entries[0] for key, entries in drawn.items()}
        with learner.bound(learner.step_inputs()), Unwaiting():
            _, grads = learner.gradient(draw)
            learner.after_step()
        assert all(bool(grad.isfinite().all()) for grad in grads)


def test_waiting_would_be_seen() -> None:
    with pytest.raises(AssertionError), Unwaiting():
        float(torch.ones(()))


@pytest.mark.parametrize("name", NAMES)
def test_seeds_can_be_mapped_over(name: str) -> None:
    learned = 2 if METHODS[name].continual else 0
    if name in MAPPED:
        methods = [make(name, learned=learned) for _ in range(2)]
        assert_replicas_are_the_learners_alone(methods, STREAM[learned])
    else:
        assert make(name, learned=learned).begin(STREAM[learned]).replicas == "branches"
    assert make(name, "convnet").begin(STREAM[0]).replicas == "branches"


@GPU
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", CONTINUAL)
def test_a_gpu_captures_later_tasks_once(name: str, net: str) -> None:
    """And the same seed gives the same bits twice."""
    torch.backends.cudnn.deterministic = True
    stream, answers = STREAM.to("cuda"), []
    for _ in range(2):
        method: Method = make(name, net, device="cuda", epochs=20)
        engine, graphs = Engine(pytest.fail), set[object]()  # not their ids, which are reused
        for index, task in enumerate(stream):
            assert learn([method], [task], engine) == [None]
            graphs.add(engine._graph)
            assert right(method, task, index) > 0.6
        assert len(graphs) == 1 + (name in FIRST_APART)
        answers.append([answer(method, task, index) for index, task in enumerate(stream)])
    assert all(map(torch.equal, *answers))


@GPU
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", NAMES)
def test_captured_steps_are_the_steps_one_by_one(
    name: str, net: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Adam makes much of little where gradients are small, so rounding must be the same.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    learned, found = 2 if METHODS[name].continual else 0, []
    for captured in (False, True):
        method = make(name, net, learned, "cuda", flip=True)
        learner = method.begin(STREAM.to("cuda")[learned])
        steps: Steps = Eager([learner])
        if captured:
            steps = graph = Graph("branches", [learner], None)
            graph.start([learner])
        with kernels.in_use():
            losses = train(steps)
        found.append((losses, [p.detach().clone() for p in learner.learned().values()]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-3, atol=1e-4)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-3)

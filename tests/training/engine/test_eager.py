"""Eager steps, and the rule that chooses how steps run."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import rankup
from helpers.learning import CPU, RECIPE, after_steps, learners, task
from rankup.rank import Rank
from rankup.training.batches import Draws, Feed, flat_rows, take
from rankup.training.engine.eager import Eager
from rankup.training.engine.learner import Learner
from rankup.training.engine.mlp import ChainLearner
from rankup.training.engine.module import ModuleLearner
from rankup.training.engine.rank import RankLearner
from rankup.training.engine.select import Engine
from rankup.training.fit import NetPupil
from rankup.training.optim import flattened, views
from rankup.training.recipe import Recipe


def test_bound_restores_tensors_after_an_error() -> None:
    (learner,) = learners(RankLearner, pad=16)
    before = {name: tensor.data_ptr() for name, tensor in learner.named_buffers()}
    with pytest.raises(KeyboardInterrupt), learner.bound(learner.step_inputs()):
        raise KeyboardInterrupt
    assert {name: tensor.data_ptr() for name, tensor in learner.named_buffers()} == before


def test_views_invert_flattened() -> None:
    tensors = {"a": torch.rand(2, 3), "b": torch.rand(()), "c": torch.rand(4)}
    for name, view in views(flattened(tensors.values(), 0), tensors).items():
        assert torch.equal(view, tensors[name])
    stacked = {name: torch.stack([t, t + 1]) for name, t in tensors.items()}
    for name, view in views(flattened(stacked.values(), 1), tensors).items():
        assert torch.equal(view, stacked[name])


def test_take_uses_the_table_of_each_replica() -> None:
    table, rows = torch.rand(3, 5, 2), torch.tensor([[0, 4], [1, 1], [3, 2]])
    expected = torch.stack([table[n][rows[n]] for n in range(3)])
    assert torch.equal(take(table, rows), expected)
    assert torch.equal(flat_rows(rows, 5), rows + torch.tensor([[0], [5], [10]]))


def test_dropout_uses_the_seed_and_no_global_state() -> None:
    body = nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 3))
    found = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        net = rankup.grow(body, Rank(2, 1), head="3")
        state = torch.get_rng_state()
        rankup.fit(net, task(0), Recipe(epochs=20, batch=32))
        assert torch.equal(torch.get_rng_state(), state)
        found.append(net.eval()(task(0).test_x, 0))
    assert torch.equal(*found)


class Drawing(nn.Identity):
    seeds: ClassVar[set[int]] = set()

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # in a step
            self.seeds.add(torch.initial_seed())
        return x * 1  # an operation, or the handwritten step would be used


def test_module_seeds_differ_by_seed_task_and_epoch() -> None:
    body = nn.Sequential(Drawing(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
    for seed in (0, 1):
        net = rankup.grow(body, Rank(2, 1), head="3")
        for index in (0, 1):
            rankup.fit(net, task(index), Recipe(epochs=20, batch=32), seed=seed)
    Drawing.seeds.remove(0)  # of tracing
    assert len(Drawing.seeds) == 2 * 2 * 20


class Sgd(ModuleLearner):
    """A method with steps of its own: a second backward pass, and a bound on what it learns."""

    def gradient(self, draw: Draws) -> tuple[Tensor, list[Tensor]]:
        loss, first = super().gradient(draw)
        _, second = super().gradient(draw)
        return loss, [(a + b) / 2 for a, b in zip(first, second, strict=True)]

    def after_step(self) -> None:
        with torch.no_grad():
            for parameter in self.body.parameters():
                parameter.clamp_(-0.0625, 0.0625)


def test_learner_may_override_gradient_and_after_step() -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
    learner = Sgd(body, Feed(task(0), Recipe(batch=8), CPU), 0)
    losses, _ = after_steps(Eager([learner]))
    assert float(losses[0]) > 0
    assert all(float(p.detach().abs().max()) <= 0.0625 for p in body.parameters())
    assert any(bool((p.detach().abs() == 0.0625).any()) for p in body.parameters())


class Halving(ModuleLearner):
    """Halves its weights before the second epoch."""

    def on_epoch_start(self, epoch: int) -> None:
        if epoch == 1:
            for parameter in self.body.parameters():
                parameter.mul_(0.5)


def test_on_epoch_start_changes_learned_tensors() -> None:
    body = nn.Linear(12, 3)
    steps = Eager([Halving(body, Feed(task(0), RECIPE, CPU), 0)])
    steps.on_epoch_start(0)
    steps.adopt()
    before = body.weight.detach().clone()
    steps.on_epoch_start(1)
    steps.adopt()
    assert torch.equal(body.weight, 0.5 * before)


def form_of(learners: Sequence[Learner]) -> str | None:
    """The form in which a GPU would run their steps."""
    for learner in learners:
        learner.feed.device = torch.device("cuda")
    return Engine(pytest.fail)._form(learners)


def test_seeds_share_a_step_if_only_tensors_differ() -> None:
    assert form_of(learners(ChainLearner, 2)) == "stacked"
    assert form_of(learners(RankLearner, 2)) == "vmap"
    for crop, form in ((0, "stacked"), (1, "branches")):
        turned: list[Learner] = []
        for seed in range(2):
            (own,) = rankup.data.make_stream("r-digits", tasks=1, seed=seed)
            net = rankup.grow(rankup.models.mlp(64, hidden=[16]), Rank(3, 1), seed=seed)
            turned.append(NetPupil(net, Recipe(crop=crop), seed).begin(own))
        # With crops a step turns its batch by the task's own angle.
        assert form_of(turned) == form


def test_runs_of_different_precision_run_one_by_one() -> None:
    pupils = [
        learners(RankLearner, recipe=replace(RECIPE, precision=precision))[0]
        for precision in ("float32", "tf32")
    ]
    for learner in pupils:
        learner.feed.device = torch.device("cuda")
    said: list[str] = []
    assert Engine(said.append)._form(pupils) is None
    assert said == ["runs are trained one by one because they multiply in different precisions"]


def test_key_differs_by_transform() -> None:
    net = rankup.grow(rankup.models.mlp(64, hidden=[16]), Rank(0, 0, seeded=8))
    keys = []
    for turned in rankup.data.make_stream("r-digits", tasks=2):
        net.begin_task(turned.name, 10)
        keys.append(RankLearner(net.train(), Feed(turned, Recipe(crop=1), CPU)).key())
        net.commit_task()
    assert keys[0] != keys[1]


def test_key_differs_once_statistics_are_constant() -> None:
    body = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16, affine=False), nn.Linear(16, 3))
    net = rankup.grow(body, Rank(0, 0, seeded=8), head="2", exclude="1")
    found = []
    for index in range(2):
        net.begin_task(f"{index}", 3)
        learner = RankLearner(net.train(), Feed(task(index), RECIPE, CPU))
        found.append((net.body.get_submodule("1").training, learner.key()))
        net.commit_task()
    assert [training for training, _ in found] == [True, False]
    assert found[0][1] != found[1][1]

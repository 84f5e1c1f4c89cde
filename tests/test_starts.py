"""Several starts of a task's new factors, of which the best is gone on from."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rankup
from rankup import fitting, train
from rankup.checkpoint import Checkpoint
from rankup.data import Stream, make_stream, to_float
from rankup.errors import RankupError
from rankup.fitting import NetPupil
from rankup.learner import RankLearner
from rankup.network import IncrementalNet
from rankup.rank import Rank
from rankup.recipe import Recipe
from zoo import GPU

RECIPE = Recipe(epochs=8, batch=64, starts=3)


def grown(rank: Rank | None = None) -> IncrementalNet:
    return rankup.grow(rankup.models.mlp(64, hidden=[24, 16]), rank or Rank(4, 1))


@pytest.fixture(scope="module")
def stream() -> Stream:
    return make_stream("p-digits", tasks=3)


@pytest.fixture
def one_task(stream: Stream) -> IncrementalNet:
    return rankup.fit(grown(), stream[0], replace(RECIPE, starts=1))


def opened(net: IncrementalNet, **given: Any) -> dict[str, Tensor]:
    """What a task starts with."""
    own = copy.deepcopy(net)
    own.begin_task("next", 10, selectors="previous", **given)
    return {name: p.detach().clone() for name, p in own.named_parameters()}


def test_another_draw_is_other_factors_and_nothing_else(one_task: IncrementalNet) -> None:
    first, same, other = (opened(one_task, draw=draw) for draw in (0, 0, 5))
    for name, tensor in first.items():
        assert torch.equal(tensor, same[name])
        is_factor = name.endswith(("new_U", "new_V"))
        assert torch.equal(tensor, other[name]) != is_factor
        if is_factor:
            torch.testing.assert_close(other[name] @ other[name].T, torch.eye(len(tensor)))


@pytest.mark.parametrize("draw", [-1, 0.5, "first"])
def test_what_is_no_draw_is_refused(one_task: IncrementalNet, draw: Any) -> None:
    with pytest.raises(RankupError, match="draw must be a whole number from 0 on, got"):
        one_task.begin_task("next", 10, draw=draw)


def test_it_goes_on_from_the_start_whose_loss_is_least(
    one_task: IncrementalNet, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def practised(pupils: Any, *rest: Any) -> list[float]:
        losses = train.practise(pupils, *rest)
        seen.append((losses, [[p.detach().clone() for p in s.net.parameters()] for s in pupils]))
        return losses

    monkeypatch.setattr(fitting, "practise", practised)
    learner = NetPupil(one_task, RECIPE, 0).begin(stream[1])
    ((losses, found),) = seen
    assert len({*losses}) == RECIPE.starts
    best = found[losses.index(min(losses))]
    for own, expected in zip(learner.learned().values(), best, strict=True):
        assert torch.equal(own, expected)
    # Further than from any one start: what was tried out is where learning begins.
    rest = [own for own in found if own is not best]
    assert not any(torch.equal(best[0], own[0]) for own in rest)


def test_trials_take_the_steps_of_a_network_alone(one_task: IncrementalNet, stream: Stream) -> None:
    scouts = [fitting._Scout(NetPupil(one_task, RECIPE, 0), draw) for draw in range(2)]
    assert scouts[0].recipe.epochs == 2
    losses = train.practise(scouts, stream[1], fitting.Engine())
    alone = copy.deepcopy(one_task)
    told: list[float] = []
    rankup.fit(
        alone,
        stream[1],
        replace(RECIPE, epochs=2, starts=1),
        seed=0,
        on_epoch=lambda epoch, _: told.append(epoch.loss),
    )
    assert losses[0] == told[-1]
    assert losses[1] != losses[0]


def test_trials_leave_no_trace(one_task: IncrementalNet, stream: Stream) -> None:
    before = {name: t.clone() for name, t in one_task.state_dict().items()}
    torch.manual_seed(3)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    pupil = NetPupil(one_task, RECIPE, 0)
    pupil.begin(stream[1])
    assert torch.equal(torch.rand(1), drawn)
    pupil.abandon()
    assert one_task.tasks == [stream[0].name]
    after = one_task.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


@pytest.mark.parametrize("rank", [Rank(0, 0, seeded=64), Rank(4, 0)])
def test_where_no_factors_are_added_nothing_is_tried(
    rank: Rank, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "practise", lambda *_: pytest.fail("tried"))
    net = grown(rank)
    for task in stream.tasks[:2]:
        rankup.fit(net, task, RECIPE)


def test_the_first_task_has_one_start(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "practise", lambda *_: pytest.fail("tried"))
    rankup.fit(grown(), stream[0], RECIPE)


@pytest.mark.parametrize("losses", [[torch.inf] * 3, [torch.inf, 0.5, torch.inf]])
def test_starts_that_diverged_are_not_gone_on_from(
    losses: list[float],
    one_task: IncrementalNet,
    stream: Stream,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def practised(pupils: Any, task: rankup.Task, _: Any) -> list[float]:
        for pupil, loss in zip(pupils, losses, strict=True):
            pupil.begin(task)
            if loss == torch.inf:
                nn.init.constant_(next(pupil.net.parameters()), torch.nan)
        return losses

    monkeypatch.setattr(fitting, "practise", practised)
    learner = NetPupil(one_task, RECIPE, 0).begin(stream[1])
    assert all(tensor.isfinite().all() for tensor in learner.learned().values())


def test_an_interrupt_in_between_leaves_the_network_as_it_was(
    one_task: IncrementalNet, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> list[float]:
        raise KeyboardInterrupt

    monkeypatch.setattr(fitting, "practise", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rankup.fit(one_task, stream[1], RECIPE)
    assert one_task.learning is None
    assert one_task.tasks == [stream[0].name]


def test_who_was_stopped_goes_on_as_if_nothing_had_happened(
    one_task: IncrementalNet, stream: Stream
) -> None:
    whole, stopped = copy.deepcopy(one_task), copy.deepcopy(one_task)
    kept: list[Checkpoint] = []
    rankup.fit(whole, stream[1], RECIPE, on_epoch=lambda epoch, point: kept.append(point))
    rankup.fit(stopped, stream[1], RECIPE, resume=kept[2])
    x = to_float(stream[1].test_x)
    assert torch.equal(whole(x, 1), stopped(x, 1))


@GPU
@pytest.mark.parametrize(
    "module",
    [
        lambda: rankup.models.mlp(64, hidden=[24, 16]),
        lambda: rankup.models.resnet18(width=4, image_size=8, channels=1),
    ],
)
def test_one_captured_graph_serves_the_trials_of_all_tasks(
    module: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, graphs = torch.device("cuda"), set[object]()
    net = rankup.grow(module(), Rank(4, 1)).to(device)
    pupil = NetPupil(net, replace(RECIPE, epochs=14), 0)
    for task in make_stream("p-digits", tasks=4):
        learner = pupil.begin(task.to(device))
        assert isinstance(learner, RankLearner)
        pupil.end()
        graphs.add(pupil._scouting._graph)
    assert len(graphs) == 2  # none for the first task

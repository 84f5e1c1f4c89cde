"""Tasks that drop the factors they can do without: which, how many, and that they stay away."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import rankup
from helpers.clusters import QUICK, clusters, net
from helpers.pruned import factored
from helpers.zoo import assert_same_bits, logits
from rankup.layers import TaskHead
from rankup.methods.options import RankOptions
from rankup.rank import Rank
from rankup.training import pruning
from rankup.training.checkpoint import Checkpoint
from rankup.training.engine.mlp import ChainLearner
from rankup.training.engine.rank import RankLearner
from rankup.training.engine.select import Engine
from rankup.training.fit import NetPupil
from rankup.training.loop import OpenTask, train
from rankup.training.pruning import Pruning, Score, with_held_out

DECAYING = replace(QUICK, weight_decay=0.1)


def pruning_net(prune: bool | float = True, seeded: int = 40) -> rankup.IncrementalNet:
    return net(rank=Rank(2, 1, seeded=seeded, prune=prune))


def opened(network: rankup.IncrementalNet, *, reuse: bool = True) -> Pruning:
    """A task that was learned and not yet committed."""
    pupil = NetPupil(network, DECAYING, 0, reuse=reuse)
    learner = pupil.begin(clusters())
    train([OpenTask(pupil, learner)], Engine().start([learner]))
    return Pruning(pupil, learner, Engine())


def numbers(network: rankup.IncrementalNet) -> dict[str, torch.Tensor]:
    return {
        name: p.detach().clone() for name, p in network.named_parameters() if "norm" not in name
    }


def of_accuracy(accuracy: float) -> Score:
    return Score(accuracy, loss=0.1, deviation=0.0, samples=20)


def test_score_is_of_the_held_out_samples() -> None:
    network = pruning_net()
    prune = opened(network)
    task = prune.learner.feed.task
    with torch.no_grad():
        answers = network.eval()(task.test_x, task=0)
    losses = nn.functional.cross_entropy(answers, task.test_y, reduction="none")
    score = prune.score()
    assert score.samples == 20
    assert score.accuracy == float((answers.argmax(1) == task.test_y).float().mean())
    assert (score.loss, score.deviation) == pytest.approx(
        (float(losses.mean()), float(losses.std()))
    )


def own_part(prune: Pruning, learner: RankLearner) -> Pruning:
    return Pruning(prune.pupil, learner, Engine())


def test_numbers_that_no_answer_needs_go_first() -> None:
    """However large they are: biases of units that the head does not look at."""
    network = pruning_net()
    prune = opened(network)
    head = next(layer for layer in network.layers if isinstance(layer, TaskHead))
    last = factored(network)[-1]
    with torch.no_grad():
        head.new_weight[:, :4] = 0
        last.new_bias[:4] = 100
    prune.drop(prune.count() // 2, 0)
    assert torch.equal(last.new_bias[:4], torch.zeros(4))
    assert bool((head.new_weight != 0).any())


@pytest.mark.parametrize("pad", [1, 64])  # tables are padded on a GPU
def test_gradients_are_those_of_autograd(pad: int) -> None:
    network = pruning_net()
    rankup.fit(network, clusters("first", seed=1), DECAYING)
    prune = opened(network)
    by_hand, feed = prune._squares(0), prune.learner.feed
    for learner in (RankLearner(network, feed, pad), ChainLearner(network, feed, pad)):
        found = own_part(prune, learner)._squares(0)
        assert found.keys() == by_hand.keys()
        for name, squares in found.items():
            torch.testing.assert_close(squares, by_hand[name], rtol=1e-3, atol=1e-9)


def test_gains_are_for_each_byte() -> None:
    network = net(rank=Rank(2, 1, seeded=40, prune=True), store="int8")
    opened(network)
    layer, head = (
        factored(network)[0],
        next(iter(h for h in network.layers if "head" in h.spec.name)),
    )
    taken = [
        pruning._bytes_of(layer, key, "int8").unique().tolist() for key in ("selector", "bias")
    ]
    assert taken == [[1, 1 + 12 + 16], [2]]  # own factors are of twelve inputs and sixteen outputs
    assert pruning._bytes_of(head, "weight", "int8").unique().tolist() == [1]
    assert pruning._bytes_of(head, "weight", "full").unique().tolist() == [4]


@pytest.mark.parametrize("needed", [0, 1, 5, 17, 60, 89])
def test_keeps_the_fewest(needed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 22 selectors, 16 biases and 51 numbers of the head, to a 32nd of all."""
    network = net(rank={"*0": Rank(2, 1, seeded=20, prune=True), "*": Rank(2, 1, seeded=20)})
    prune = opened(network)
    assert prune.count() == 22 + 16 + 51
    monkeypatch.setattr(prune, "score", lambda: of_accuracy(prune.count() >= needed))
    monkeypatch.setattr(prune, "learn_on", lambda number: None)
    prune.run(tolerance=1)
    assert needed <= prune.count() <= needed + 89 // 32


@pytest.mark.parametrize("tolerance", [0.0, 1.0, 3.0])
def test_accuracy_stays_within_the_tolerance(tolerance: float) -> None:
    network = pruning_net()
    prune = opened(network)
    before, whole = prune.score(), prune.count()
    prune.run(tolerance)
    assert prune.score().is_within(before, tolerance)
    assert prune.count() < whole  # it learns easily


def test_large_tolerance_keeps_a_few_and_none_would_be_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prune = opened(pruning_net(seeded=510))
    whole = prune.count()
    monkeypatch.setattr(prune, "score", lambda: of_accuracy(0.5))
    prune.run(tolerance=1e6)
    assert prune.count() == whole // 2**5


def test_what_cannot_be_dropped_is_kept_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    network = pruning_net()
    prune = opened(network)
    before, whole = numbers(network), prune.count()
    monkeypatch.setattr(prune, "score", lambda: of_accuracy(prune.count() == whole))
    prune.run(tolerance=1)
    for name, after in numbers(network).items():
        assert torch.equal(after, before[name])


@pytest.mark.parametrize("reuse", [True, False])  # learned by hand-written gradients, by autograd
@pytest.mark.parametrize("pad", [1, 64])
def test_dropped_numbers_stay_dropped(reuse: bool, pad: int) -> None:
    network = pruning_net()
    rankup.fit(network, clusters("first", seed=1), DECAYING)
    prune = opened(network, reuse=reuse)
    prune = own_part(prune, type(prune.learner)(network, prune.learner.feed, pad))
    before = numbers(network)
    prune.drop(100, 0)
    dropped = {name: tensor == 0 for name, tensor in numbers(network).items()}
    assert prune.count() == 100
    prune.learn_on(0)
    for name, now in numbers(network).items():
        if not name.endswith(("U", "V")):
            assert torch.equal(now == 0, dropped[name])
            is_left = ~dropped[name]
            assert not is_left.any() or not torch.equal(before[name][is_left], now[is_left])
    assert prune.learner.feed.recipe == DECAYING


def test_task_stores_less_and_is_as_right() -> None:
    task, sizes, right = clusters(), {}, {}
    for prune in (False, True):
        network = rankup.fit(pruning_net(prune), task, QUICK)
        sizes[prune], right[prune] = network.size().bytes, rankup.accuracy(network, task)
    assert sizes[True] < 0.8 * sizes[False]
    assert right[True] >= right[False] - 0.02


def test_committed_tasks_do_not_change() -> None:
    network, x = pruning_net(), clusters().test_x
    rankup.fit(network, clusters("a"), QUICK)
    before = logits(network, x)
    rankup.fit(network, clusters("b", seed=1), QUICK)
    assert_same_bits(before, logits(network, x)[:1])
    selected = [layer.S[1] for layer in factored(network)]
    assert all(bool((row == 0).any() and (row != 0).any()) for row in selected)


def test_held_out_samples_are_not_learned_from() -> None:
    task = clusters()
    held = with_held_out(task, seed=0)
    assert (len(held.train_y), len(held.test_y)) == (180, 20)
    whole = {tuple(row) for row in task.train_x.tolist()}
    learned, apart = ({tuple(row) for row in x.tolist()} for x in (held.train_x, held.test_x))
    assert learned | apart == whole
    assert not learned & apart
    fed = opened(pruning_net()).learner.feed.task
    assert torch.equal(fed.train_x, held.train_x)
    assert torch.equal(fed.test_x, held.test_x)


def test_at_most_five_thousand_are_held_out() -> None:
    x, y = torch.zeros(60_000, 1, dtype=torch.uint8), torch.arange(60_000) % 2
    assert len(with_held_out(rankup.Task("t", 2, x, y, x, y), seed=0).test_y) == 5_000


@pytest.mark.parametrize("epoch", [1, 3])
def test_resumed_task_drops_the_same(epoch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, task, x = replace(QUICK, epochs=3), clusters(), clusters().test_x
    kept: list[Checkpoint] = []

    def keep(_: object, checkpoint: Checkpoint) -> None:
        kept.append(checkpoint)
        assert checkpoint.state

    whole = rankup.fit(pruning_net(), task, recipe)
    interrupted = pruning_net()
    with monkeypatch.context() as patch:
        patch.setattr(pruning.Pruning, "learn_on", _interrupted(pruning.Pruning.learn_on))
        with pytest.raises(KeyboardInterrupt):
            rankup.fit(interrupted, task, recipe, on_epoch=keep)
    assert interrupted.tasks == []
    resumed = rankup.fit(interrupted, task, recipe, resume=kept[epoch - 1])
    assert_same_bits(logits(whole, x), logits(resumed, x))
    assert whole.describe(0).kept == resumed.describe(0).kept


def _interrupted(learn_on: Callable[..., None]) -> Callable[..., None]:
    def stop_later(self: Pruning, number: int) -> None:
        learn_on(self, number)
        if number == 1:
            raise KeyboardInterrupt

    return stop_later


def test_networks_of_convolutions_and_batch_norms_drop_factors() -> None:
    x = torch.randn(220, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0].mean((1, 2)) > 0).long()
    x[:, 0] += y[:, None, None]
    task = rankup.Task("means", 2, x[:200], y[:200], x[200:], y[200:])
    module = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2)),
    )
    network = rankup.grow(module, Rank(2, 1, seeded="4x", prune=True), store="int8")
    rankup.fit(network, task, replace(QUICK, epochs=3))
    kept = network.describe("means").kept
    assert len(kept) == len(factored(network))
    assert any(each.factors < each.of for each in kept.values())
    for layer in factored(network):
        assert int((layer.S[0] != 0).sum()) == kept[layer.spec.name].factors


def test_layers_without_prune_keep_everything() -> None:
    rule = {"*0": Rank(2, 1, seeded=40, prune=True), "*": Rank(2, 1, seeded=40)}
    network = rankup.fit(net(rank=rule), clusters(), QUICK)
    first, second = factored(network)
    assert list(network.describe("clusters").kept) == [first.spec.name]
    assert bool((first.S[0] == 0).any())
    assert bool((second.S[0] != 0).all())


def test_several_tasks_at_once_drop_factors() -> None:
    network = rankup.grow(
        rankup.models.mlp(12, hidden=[16, 16]), Rank(2, 1, seeded=40, prune=True), base="keep"
    )
    tasks = [clusters("a"), clusters("b", seed=1)]
    assert rankup.fit_together(network, tasks, QUICK) == {}
    for task in tasks:
        kept = network.describe(task.name).kept.values()
        assert sum(each.factors for each in kept) < sum(each.of for each in kept)


def test_network_with_a_router_drops_factors() -> None:
    network = net(rank=Rank(2, 1, seeded=40, prune=True), router="means")
    for name, seed in (("a", 0), ("b", 1)):
        rankup.fit(network, clusters(name, seed=seed), QUICK)
    kept = network.describe("b").kept.values()
    assert sum(each.factors for each in kept) < sum(each.of for each in kept)


def test_teacher_that_has_dropped_factors_teaches() -> None:
    teacher = rankup.fit(pruning_net(), clusters(), QUICK)
    pupil = rankup.fit(pruning_net(), clusters(), QUICK, teacher=teacher)
    assert rankup.accuracy(pupil, clusters()) > 0.9


@pytest.mark.parametrize("prune", [-1, float("nan"), float("inf"), "yes", None])
def test_tolerance_must_be_a_number(prune: object) -> None:
    with pytest.raises(rankup.RankupError, match="prune must be True, False or a number"):
        Rank(2, 1, prune=prune)  # type: ignore[arg-type]


def test_one_network_has_one_tolerance() -> None:
    rule = {"*0": Rank(2, 1, prune=True), "*": Rank(2, 1, prune=2)}
    with pytest.raises(rankup.RankupError, match=r"must be the same, got 1\.0 and 2\.0"):
        net(rank=rule)


def test_too_few_samples_are_refused_before_anything_is_learned() -> None:
    task = clusters()
    few = replace(task, train_x=task.train_x[:199], train_y=task.train_y[:199])
    network = pruning_net()
    with pytest.raises(rankup.RankupError, match="has 199 training samples.* at least 200"):
        rankup.fit(network, few, QUICK)
    assert network.tasks == []
    assert network.learning is None


def test_nothing_to_select_from_is_refused() -> None:
    with pytest.raises(rankup.RankupError, match="nothing to select from"):
        Rank(0, 0, prune=True)


def test_tolerance_needs_prune() -> None:
    with pytest.raises(rankup.RankupError, match="tolerance says how far prune may go"):
        RankOptions(tolerance=2.0)


def test_run_drops_factors(tmp_path: Path) -> None:
    options = {"rank": "1,1", "seeded": "64", "epochs": 5, "prune": True, "tolerance": 2.0}
    rankup.run("rank", "p-digits", tasks=1, width=16, out=tmp_path, **options)
    network = rankup.load(tmp_path / "net")
    assert network.options.rank == Rank(1, 1, seeded=64, prune=2.0)
    kept = network.describe(0).kept.values()
    assert sum(each.factors for each in kept) < sum(each.of for each in kept)

"""IBP-WF: a dictionary of factors, selections under the prior of an Indian buffet process, and no
change to what a learned task selects."""

import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Kumaraswamy
from torch.distributions.relaxed_bernoulli import LogitRelaxedBernoulli

import rankup
from helpers.rivals import (
    KINDS,
    answer,
    inputs,
    net,
    right,
    toys,
)
from rankup.data.streams import Stream
from rankup.data.tasks import Task
from rankup.growing.options import GrowOptions
from rankup.layers import active
from rankup.methods import method_options
from rankup.methods.base import Setting
from rankup.methods.ibpwf import (
    _FASTER,
    BuffetLearner,
    DictionaryWeight,
    WeightFactors,
    divergence,
    drawn,
    expected_odds,
    logistic_divergence,
    relaxed,
)
from rankup.methods.shared.bits import unpack
from rankup.rank import Rank
from rankup.testing import make_method
from rankup.training.batches import Draws, Feed
from rankup.training.engine.eager import Eager
from rankup.training.loop import OpenTask, train
from rankup.training.recipe import Recipe

GROWTH = GrowOptions(Rank(1, 1))
F64 = torch.float64


def make(kind: str = "mlp", **options: float) -> Any:
    options = {"dictionary": 32, "alpha": 6.0, **options}
    recipe = {"epochs": 20 if kind == "mlp" else 10, "batch": 16, "weight_decay": 0.1}
    stream = Stream("toys", tuple(toys(*KINDS[kind])))
    return make_method("ibpwf", stream, net(kind), options=options, **recipe)


def layers(method: WeightFactors) -> list[DictionaryWeight]:
    return [part for part in method.parts if isinstance(part, DictionaryWeight)]


def middles(count: int) -> Tensor:
    """Midpoints of equal intervals, to represent a uniform variable."""
    return (torch.arange(count, dtype=F64) + 0.5) / count


# The bound that is maximised.


@pytest.mark.parametrize("temperature", [0.3, 2 / 3])
@pytest.mark.parametrize(("one", "other"), [(0.0, 0.01), (1.0, -2.0), (-4.0, 3.0), (2.0, 2.0)])
def test_selections_diverge_as_relaxed_bernoullis_do(
    temperature: float, one: float, other: float
) -> None:
    y = torch.linspace(-80, 80, 400_001, dtype=F64)
    q, p = (
        LogitRelaxedBernoulli(
            torch.tensor(temperature, dtype=F64), logits=torch.tensor(logits, dtype=F64)
        ).log_prob(y)
        for logits in (one, other)
    )
    wanted = torch.trapezoid(q.exp() * (q - p), y)
    got = logistic_divergence(torch.tensor(other - one, dtype=F64))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_divergence_has_a_gradient_everywhere() -> None:
    apart = torch.tensor([-3000.0, -200.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 88.8, 200.0, 3000.0])
    (found,) = torch.autograd.grad(logistic_divergence(apart.requires_grad_()).sum(), apart)
    at_one = (math.sinh(1) - 1) / (math.cosh(1) - 1)
    wanted = torch.tensor([-1, -1, -at_one, -1e-3 / 3, 0, 1e-3 / 3, at_one, 1, 1, 1])
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("parameters", [(3.0, 1.0, 5.0, 1.0), (2.0, 1.5, 4.0, 0.7)])
def test_sticks_diverge_as_kumaraswamys_do(parameters: tuple[float, ...]) -> None:
    """On average over the sample, and together with the divergence of a selection from its
    stick."""
    a, b, c, d = (torch.tensor(value, dtype=F64) for value in parameters)
    u, odds = middles(200_000), 0.4
    v = (1 - (1 - u) ** (1 / b)) ** (1 / a)
    q, p = Kumaraswamy(a, b), Kumaraswamy(c, d)
    departs = logistic_divergence(v.logit() - odds)
    wanted = (q.log_prob(v) - p.log_prob(v) + departs).mean()
    got = divergence(
        torch.full((len(u), 1), odds, dtype=F64),
        torch.stack([a, b]).log()[:, None, None].expand(2, len(u), 1),
        torch.stack([c, d]).log()[:, None, None].expand(2, len(u), 1),
        u[:, None],
    )
    torch.testing.assert_close(got / len(u), wanted, rtol=1e-3, atol=1e-4)


def test_prior_is_the_product_of_sticks() -> None:
    alpha, odds = 3.0, [0.5, -1.0, 0.2, -3.0]
    uniform = [0.3, 0.9, 0.05, 0.6]
    sticks = torch.tensor([[math.log(alpha)] * 4, [0.0] * 4], dtype=F64)
    wanted, pi = 0.0, 1.0
    for own, u in zip(odds, uniform, strict=True):
        pi *= u ** (1 / alpha)  # Beta(α, 1)
        z = math.log(pi / (1 - pi)) - own
        wanted += z / math.tanh(z / 2) - 2
    got = divergence(
        torch.tensor(odds, dtype=F64), sticks, sticks, torch.tensor(uniform, dtype=F64)
    )
    assert float(got) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("temperature", [0.1, 2 / 3])
@pytest.mark.parametrize("level", [0.5, 0.9])
def test_relaxed_selections_follow_their_odds(temperature: float, level: float) -> None:
    odds = torch.tensor([[-2.0], [0.0], [1.5]], dtype=F64)
    above = (relaxed(odds, temperature, middles(100_000)) > level).to(F64).mean(1)
    wanted = torch.sigmoid(odds[:, 0] - temperature * math.log(level / (1 - level)))
    torch.testing.assert_close(above, wanted, atol=1e-4, rtol=0)


def test_a_new_task_expects_what_the_sticks_mean() -> None:
    prior = torch.tensor([[math.log(5.0)] * 12, [0.0] * 12], dtype=F64)
    wanted = torch.tensor([(5 / 6) ** (k + 1) for k in range(12)], dtype=F64)
    torch.testing.assert_close(expected_odds(prior).sigmoid(), wanted)
    a, b, u = 2.0, 3.0, middles(1_000_000)
    mean = ((1 - (1 - u) ** (1 / b)) ** (1 / a)).mean()
    got = expected_odds(torch.tensor([[a], [b]], dtype=F64).log()).sigmoid()
    torch.testing.assert_close(got[0], mean, rtol=1e-5, atol=0)


class PriorAlone(BuffetLearner):
    """Learns without data."""

    def surprise(self, draw: Draws) -> Tensor:
        return 0 * super().surprise(draw)


def test_loss_is_surprise_and_a_share_of_divergence() -> None:
    method = make()
    method.learn(method.setting.tasks[0], None, None)
    learner = method.begin(method.setting.tasks[1])
    alone = PriorAlone(method.body, learner.feed, 1, method.options)
    _, _, draw = inputs(learner)
    selections, price = {}, torch.tensor(0.0)
    for number, layer in enumerate(layers(method)):
        for_selections, for_sticks = draw["noise"][:, number]
        selections[layer.spec.name] = relaxed(layer.odds(), 2 / 3, for_selections)
        posterior = layer.sticks + layer.new_sticks
        price = price + divergence(layer.odds(), posterior, layer.sticks, for_sticks)
    with drawn(selections), active(1):
        logits = method.body(learner.inputs(draw))
    loss = F.cross_entropy(logits, learner.y[draw["rows"]])
    torch.testing.assert_close(learner(draw), loss + price / 96)
    torch.testing.assert_close(alone(draw), price / 96)


@pytest.mark.parametrize("rows", [(3,), (400,), (2, 2)])
def test_factors_and_the_weight_of_a_selection_map_alike(rows: tuple[int, ...]) -> None:
    method = make()
    method.learn(method.setting.tasks[0], None, None)
    method.begin(method.setting.tasks[1])
    layer = layers(method)[0]
    assert 0 < int(layer.taken.sum()) < layer.factors
    selection = torch.rand(layer.factors, requires_grad=True)
    x = torch.randn(*rows, layer.spec.inputs)
    with drawn({layer.spec.name: selection}), active(1):
        got = layer(x)
    wanted = F.linear(x, layer.selecting(selection), layer.new_bias)
    learned = [selection, layer.new_U, layer.new_V, layer.new_scales, layer.new_bias]
    torch.testing.assert_close(
        [got, *torch.autograd.grad(got.square().mean(), learned)],
        [wanted, *torch.autograd.grad(wanted.square().mean(), learned)],
    )


@pytest.mark.parametrize("start", [-3.0, 2.0])
def test_without_data_selections_follow_the_prior(start: float) -> None:
    """Within a tenth: the posterior treats selections as independent of the sticks."""
    alpha, count, steps = 10.0, 40, 300
    x, y = torch.rand(steps, 4), torch.arange(steps) % 2
    data, recipe = Task("nothing to learn", 2, x, y, x, y), Recipe(epochs=1, batch=1)
    options = method_options("ibpwf", {"dictionary": count, "alpha": alpha})
    small = rankup.models.mlp(4, hidden=[3])
    method = WeightFactors(Setting(small, GROWTH, recipe, 0, [data], options))
    method.begin(data)
    learner = PriorAlone(method.body, Feed(data, recipe, method.device), 0, method.options)
    (layer,) = learner.layers
    with torch.no_grad():
        layer.new_odds += (start - layer.odds()) / _FASTER
    assert torch.allclose(layer.odds(), torch.tensor(start), atol=1e-5)
    train([OpenTask(method, learner)], Eager([learner]))
    asked = sum((alpha / (alpha + 1)) ** (k + 1) for k in range(count))  # 9.78
    assert float(layer.odds().detach().sigmoid().sum()) == pytest.approx(asked, rel=0.1)
    a, b = (layer.sticks + layer.new_sticks).detach().exp()
    assert float(a.mean()) == pytest.approx(alpha, rel=0.25)
    assert float(b.mean()) == pytest.approx(1, rel=0.25)


def test_posterior_sticks_are_the_next_prior() -> None:
    method = make()
    first, second, _ = method.setting.tasks
    for task in (first, second):
        method.begin(task)
        before = [layer.sticks.clone() for layer in layers(method)]
        with torch.no_grad():
            for layer in layers(method):
                layer.new_sticks += 0.3
        method.end()
        for layer, old in zip(layers(method), before, strict=True):
            assert torch.equal(layer.sticks, old + 0.3)
            assert torch.equal(layer.expected, expected_odds(old + 0.3))


def test_a_weight_starts_with_kaimings_deviation() -> None:
    method = make(dictionary=200, alpha=30.0)
    method.begin(method.setting.tasks[0])
    for layer in layers(method):
        draw = torch.Generator().manual_seed(0)
        weights = [
            layer.selecting(torch.bernoulli(layer.expected.sigmoid(), generator=draw)).detach()
            for _ in range(20)
        ]
        deviation = float(torch.stack(weights).std())
        assert deviation == pytest.approx(math.sqrt(2 / layer.spec.inputs), rel=0.1)


# What is selected, frozen and answered with.


@pytest.mark.parametrize("kind", KINDS)
def test_factors_in_use_and_old_answers_stay_bit_for_bit(kind: str) -> None:
    method, kept = make(kind), list[Tensor]()
    tasks = method.setting.tasks
    for index, each in enumerate(tasks):
        before = [(la.taken.clone(), la.U.clone(), la.V.clone()) for la in layers(method)]
        method.learn(each, None, None)
        for layer, (taken, U, V) in zip(layers(method), before, strict=True):
            assert torch.equal(layer.U[taken], U[taken])
            assert torch.equal(layer.V[taken], V[taken])
            assert torch.equal(layer.taken, layer.selections.any(0))
        assert right(method, each, index) > 0.8
        kept.append(answer(method, each, index))
        assert all(torch.equal(answer(method, tasks[j], j), old) for j, old in enumerate(kept))
    selections = torch.cat([layer.selections[:, None] for layer in layers(method)], 1)  # [T, L, K]
    assert bool((selections[0] & selections[1]).any())  # factors are shared …
    assert bool((selections[2] & ~selections[:2].any(0)).any())  # … and free ones are taken later


def test_only_free_factors_get_gradients() -> None:
    method = make()
    method.learn(method.setting.tasks[0], None, None)
    learner = method.begin(method.setting.tasks[1])
    with learner.bound({}):
        _, grads = learner.gradient(inputs(learner)[2])
    by_name = dict(zip(learner.learned(), grads, strict=True))
    for layer in layers(method):
        for part in ("U", "V"):
            grad = by_name[f"body.{layer.spec.name}.new_{part}"]
            assert not bool(grad[layer.taken].any())
            assert bool(grad[~layer.taken].any())
        assert bool(by_name[f"body.{layer.spec.name}.new_scales"][layer.taken].any())


@pytest.mark.parametrize("keep", [0.5, 0.6])
def test_a_learned_task_answers_with_rounded_selections(keep: float) -> None:
    method = make(keep=keep)
    first, second, _ = method.setting.tasks
    method.learn(first, None, None)
    method.begin(second)
    wanted = []
    with torch.no_grad():
        for layer in layers(method):
            layer.new_odds += (torch.linspace(-1, 1, 32) - layer.odds()) / _FASTER
            probability = layer.odds().sigmoid()
            weight = torch.zeros(layer.spec.outputs, layer.spec.inputs)
            for k in range(32):
                if probability[k] >= keep:
                    frozen = bool(layer.taken[k])
                    u, v = (layer.U, layer.V) if frozen else (layer.new_U, layer.new_V)
                    weight += probability[k] * layer.new_scales[k] * torch.outer(u[k], v[k])
            wanted.append((probability >= keep, weight))
    open_ = answer(method, second, 1)
    method.end()
    assert torch.equal(answer(method, second, 1), open_)
    for layer, (chosen, weight) in zip(layers(method), wanted, strict=True):
        assert 0 < int(chosen.sum()) < 32
        assert torch.equal(layer.selections[1], chosen)
        torch.testing.assert_close(layer.weight(1), weight, rtol=1e-4, atol=1e-5)


def test_noise_comes_from_what_was_drawn_alone() -> None:
    method = make()
    learner = method.begin(method.setting.tasks[0])
    drawn = learner.sample_epoch(torch.Generator().manual_seed(0))
    assert drawn["noise"].shape == (learner.feed.steps_per_epoch, 2, 2, 32)
    assert 0 < float(drawn["noise"].min()) < float(drawn["noise"].max()) < 1
    first, second = ({name: entries[n] for name, entries in drawn.items()} for n in (0, 1))
    state = torch.get_rng_state()
    loss = learner(first)
    assert torch.equal(loss, learner(first))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(loss, learner(first | {"noise": second["noise"]}))


def test_full_dictionary_warns_and_still_learns() -> None:
    method = make(dictionary=12, alpha=20.0, keep=0.01)
    first, second, _ = method.setting.tasks
    method.learn(first, None, None)
    assert all(bool(layer.taken.all()) for layer in layers(method))
    old = answer(method, first, 0)
    says = "task '1' finds none of the 12 factors free in hidden.0, hidden.1 and learns with those"
    with pytest.warns(UserWarning, match=says):
        method.learn(second, None, None)
    assert right(method, second, 1) > 0.8
    assert torch.equal(answer(method, first, 0), old)
    assert all(len(layer.added(1)["U"]) == 0 for layer in layers(method))


# What is stored.


def test_the_file_holds_the_factors_in_use_and_no_others(tmp_path: Path) -> None:
    method = make()
    for each in method.setting.tasks:
        method.learn(each, None, None)
    method.save(tmp_path)
    saved = safetensors.torch.load((tmp_path / "weights-0001.safetensors").read_bytes())
    for layer in layers(method):
        used = torch.zeros(32, dtype=torch.bool)
        for index in range(3):
            name = f"{index}/{layer.spec.name}"
            chosen = unpack(saved[f"{name}.selection"], 1, 32).bool()
            new = chosen & ~used
            assert len(saved[f"{name}.scales"]) == int(chosen.sum())
            assert torch.equal(saved[f"{name}.U"], layer.U[new])
            assert torch.equal(saved[f"{name}.V"], layer.V[new])
            assert (f"{name}.sticks" in saved) == (index == 2)
            used |= chosen
        assert 0 < int(used.sum()) < 32
    assert {name.split("/")[0] for name in saved} == {"0", "1", "2"}


# How it is run.

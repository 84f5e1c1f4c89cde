"""Winning subnetworks: masks of an exact size over shared weights, which nobody changes once a task
uses them, and which later tasks use again."""

from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.rivals import KINDS, answer, net, right, toys
from rankup.data.streams import Stream
from rankup.methods.wsn import WSN, WsnLearner, largest
from rankup.testing import make_method
from rankup.training.engine.eager import Eager
from rankup.training.recipe import Recipe

RECIPE = Recipe(epochs=8, batch=16, lr=1e-2)


def make(kind: str = "mlp", recipe: Recipe = RECIPE, seed: int = 0, **options: float) -> WSN:
    stream = Stream("toys", tuple(toys(*KINDS[kind])))
    method = make_method("wsn", stream, net(kind), options=options, seed=seed, **asdict(recipe))
    assert isinstance(method, WSN)
    return method


def learned(method: WSN, tasks: int = 3) -> WSN:
    for task in method.setting.tasks[method.learned : tasks]:
        method.learn(task, None, None)
    return method


def effective(method: WSN, task: int) -> dict[str, Tensor]:
    """A task's weights and biases, by hand from what is stored."""
    found = {}
    for name, weight in method.weights.items():
        bits = [
            int(byte) >> place & 1
            for byte in method.kept[f"{name}.masks"][task]
            for place in range(8)
        ]
        mask = torch.tensor(bits[: weight.numel()], dtype=torch.bool).view_as(weight)
        found[name] = weight.detach().masked_fill(~mask, 0)
    return found | {name: method.kept[name][task].clone() for name in method.biases}


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_later_task_changes_what_a_task_runs_with(kind: str, optimiser: str) -> None:
    rate = 0.3 if optimiser == "sgd" else 1e-2
    recipe = replace(RECIPE, optimiser=optimiser, lr=rate, weight_decay=0.05)
    method, tasks = make(kind, recipe, share=0.4), toys(*KINDS[kind])
    ran_with: list[dict[str, Tensor]] = []
    answered: list[Tensor] = []
    for index, task in enumerate(tasks):
        before = {name: weight.detach().clone() for name, weight in method.weights.items()}
        learned(method, index + 1)
        changed = [not torch.equal(method.weights[name], old) for name, old in before.items()]
        assert all(changed)  # it has learned, too
        ran_with.append(effective(method, index))
        answered.append(answer(method, task, index))
        for old in range(index + 1):
            now = effective(method, old)
            assert all(torch.equal(now[name], tensor) for name, tensor in ran_with[old].items())
            assert torch.equal(answer(method, tasks[old], old), answered[old])


@pytest.mark.parametrize("share", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("kind", KINDS)
def test_masks_keep_the_stated_share_of_every_layer(kind: str, share: float) -> None:
    method = learned(make(kind, share=share), 2)
    for name, weight in method.weights.items():
        for task in range(2):
            assert int(method.mask(name, task).sum()) == max(1, round(share * weight.numel()))


def test_masks_are_of_an_exact_size_where_scores_tie() -> None:
    for count in range(1, 61):
        mask = largest(torch.arange(60).view(6, 10).float() // 25, count)
        assert int(mask.sum()) == count
        assert mask.flatten()[50:].sum() == min(count, 10)  # the largest first


def test_masks_are_the_largest_scores_of_either_sign() -> None:
    method = make(share=0.2)
    learner = method.begin(method.setting.tasks[0])
    assert isinstance(learner, WsnLearner)
    name = next(iter(method.weights))
    scores = learner.scores(name).detach()
    mask = learner.mask(name)
    assert float(scores.abs()[mask].min()) >= float(scores.abs()[~mask].max())
    assert bool((scores[mask] < 0).any())
    assert bool((scores[mask] > 0).any())
    method.end()
    assert torch.equal(method.mask(name, 0), mask)


def test_later_tasks_reuse_weights_and_add_some() -> None:
    method = learned(make(share=0.3))
    for name in method.weights:
        first, second, third = (method.mask(name, task) for task in range(3))
        for mask, before in ((second, first), (third, first | second)):
            assert bool((mask & before).any())
            assert bool((mask & ~before).any())
        assert torch.equal(method.used(name), first | second | third)


def test_what_was_reused_matters() -> None:
    """A task is answered worse without the weights of the task before it."""
    method = learned(make(share=0.3), 2)
    task = method.setting.tasks[1]
    before = F.cross_entropy(answer(method, task, 1), task.test_y)
    with torch.no_grad():
        for name, weight in method.weights.items():
            weight.masked_fill_(method.mask(name, 0), 0)
    assert float(F.cross_entropy(answer(method, task, 1), task.test_y)) > 2 * float(before)


def test_a_task_can_choose_among_frozen_weights_alone() -> None:
    method = learned(make(share=0.5), 1)
    for name in method.weights:
        method.kept[f"{name}.masks"] = torch.full_like(method.kept[f"{name}.masks"], 255)
        assert bool(method.used(name).all())
    weights = {name: weight.detach().clone() for name, weight in method.weights.items()}
    learned(method, 2)
    assert all(torch.equal(method.weights[name], old) for name, old in weights.items())
    assert right(method, method.setting.tasks[1], 1) > 0.9


def test_gradients_are_the_masked_networks_and_straight_through_to_scores() -> None:
    method = make(share=0.3)
    learner = method.begin(method.setting.tasks[0])
    assert isinstance(learner, WsnLearner)
    draws = learner.sample_epoch(torch.Generator().manual_seed(0))
    with learner.bound({}):
        _, grads = learner.gradient({name: entries[0] for name, entries in draws.items()})
    found = dict(zip(learner.learned(), grads, strict=True))

    (x, y), rows = (learner.x, learner.y), draws["rows"][0]
    masks = {name: learner.mask(name) for name in method.weights}
    leaves = {
        name: (weight.detach() * masks[name]).requires_grad_()
        for name, weight in method.weights.items()
    }
    hidden = x[rows]
    for name in ("hidden.0", "hidden.1"):
        bias = method.biases[f"{name}.bias"].detach()
        hidden = torch.relu(hidden @ leaves[f"{name}.weight"].t() + bias)
    head = {key: p.detach() for key, p in method.head.named_parameters()}
    logits = hidden @ head["new_weight"].t() + head["new_bias"]
    F.cross_entropy(logits, y[rows]).backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        torch.testing.assert_close(found[f"body.{name}"], leaf.grad * masks[name])
        scores = learner.scores(name).detach()
        straight = leaf.grad * method.weights[name].detach() * scores.sign()
        torch.testing.assert_close(found[f"scores/{name.replace('.', '/')}"], straight)
        assert bool(straight[~masks[name]].any())  # weights that are out can come in


def test_scores_are_drawn_anew_from_the_seed() -> None:
    drawn = []
    for seed in (0, 0, 1):
        method = make(seed=seed)
        for task in method.setting.tasks[:2]:
            learner = method.begin(task)
            assert isinstance(learner, WsnLearner)
            drawn.append(learner.scores("hidden.0.weight").detach().clone())
            Eager([learner]).adopt()
            method.end()
    same = [torch.equal(drawn[0], other) for other in drawn[1:]]
    assert same == [False, True, False, False, False]
    assert float(drawn[0].abs().max()) <= 1 / 8  # 1 / √inputs


def test_biases_are_per_task_and_begin_where_the_last_ended() -> None:
    method = learned(make(), 2)
    method.begin(method.setting.tasks[2])
    for name, bias in method.biases.items():
        assert torch.equal(bias, method.kept[name][1])
        assert not torch.equal(*method.kept[name])

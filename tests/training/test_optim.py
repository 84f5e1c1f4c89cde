"""Optimisers on one flat tensor, against torch's own, and rates over a task."""

import pytest
import torch
from torch import Tensor

from rankup.training.optim import FlatAdam, FlatSGD, PerReplica, rate
from rankup.training.recipe import PAPER, Recipe


def test_flat_adam_is_torchs_adamw() -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), (2, 2, 2)]
    start = [torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes]
    ours = torch.cat([tensor.flatten() for tensor in start]).requires_grad_()
    theirs = [torch.nn.Parameter(tensor) for tensor in start]
    flat = FlatAdam(ours.detach(), weight_decay=0.1)
    reference = torch.optim.AdamW(theirs, lr=0.02, weight_decay=0.1)

    def loss(parameters: list[torch.nn.Parameter]) -> Tensor:
        return sum((p.sin() * p).sum() for p in parameters)

    for _ in range(20):
        flat.step(*torch.autograd.grad(loss([ours]), ours), 0.02)
        reference.zero_grad()
        loss(theirs).backward()
        reference.step()
    expected = torch.cat([p.detach().flatten() for p in theirs])
    torch.testing.assert_close(ours.detach(), expected, rtol=1e-9, atol=1e-12)


def test_flat_sgd_has_decoupled_weight_decay() -> None:
    start, grad = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.25])
    flat = FlatSGD(start.clone(), weight_decay=0.1)
    for _ in range(2):
        flat.step(grad, 0.5)
    once = start * 0.95 - 0.5 * grad
    torch.testing.assert_close(flat.flat, once * 0.95 - 0.5 * grad)


def test_replicas_may_have_different_optimisers() -> None:
    recipes = [Recipe(), Recipe(optimiser="sgd"), Recipe(weight_decay=0.5)]
    rows, grad, rates = torch.ones(3, 4), torch.rand(3, 4), torch.tensor([0.1, 0.2, 0.3])
    together = PerReplica(recipes, rows.clone())
    together.step(grad, rates)
    alone = [FlatAdam(rows[0].clone(), 0.0), FlatSGD(rows[1].clone(), 0.0)]
    alone.append(FlatAdam(rows[2].clone(), 0.5))
    for number, optimiser in enumerate(alone):
        optimiser.step(grad[number], float(rates[number]))
        assert torch.equal(together.flat[number], optimiser.flat)
        assert torch.equal(together.state(number)["flat"], optimiser.flat)


def test_one_cycle_rises_then_falls() -> None:
    recipe = Recipe(warmup=0.2)
    rates = [rate(recipe, 0.5, step, 101) for step in range(101)]
    assert rates[0] == 0
    assert rates[20] == 0.5 == max(rates)
    assert rates[-1] == pytest.approx(0)
    assert rates[:21] == sorted(rates[:21])
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert {rate(PAPER, 0.5, step, 101) for step in range(101)} == {0.5}

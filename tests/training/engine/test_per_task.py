"""The optimiser of several tasks at once does for each what torch's does for one."""

import pytest
import torch
from torch import Tensor

from rankup import Recipe
from rankup.training.engine.per_task import PerTaskOptimiser

TASKS, NUMBERS = 3, 20


def flat() -> Tensor:
    return torch.randn(TASKS, NUMBERS, dtype=torch.float64, generator=torch.Generator())


def column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def torchs(recipe: Recipe, start: Tensor, lr: float) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if recipe.optimiser == "adam" else torch.optim.SGD
    decay = recipe.weight_decay if recipe.optimiser == "adam" else 0.0
    return kind([torch.nn.Parameter(start.clone())], lr=lr, weight_decay=decay)


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_steps_as_torchs_own_with_clipped_gradients(optimiser: str) -> None:
    recipes = [Recipe(optimiser=optimiser, weight_decay=0) for _ in range(TASKS)]  # type: ignore[arg-type]
    lr, start = [0.1, 0.01, 0.03], flat()
    ours = PerTaskOptimiser(recipes, start.clone(), 1.0, scales=False)
    theirs = [torchs(*each) for each in zip(recipes, start, lr, strict=True)]
    learns = torch.ones(TASKS, 1, dtype=torch.bool)
    for step in range(5):
        grad = 10 ** (step - 2) * flat()
        ours.step(grad.clone(), column(lr), learns)
        for optimiser_, own in zip(theirs, grad, strict=True):
            (parameter,) = optimiser_.param_groups[0]["params"]
            parameter.grad = own.clone()
            torch.nn.utils.clip_grad_norm_([parameter], 1.0)
            optimiser_.step()
    expected = torch.stack([each.param_groups[0]["params"][0].detach() for each in theirs])
    torch.testing.assert_close(ours.state["flat"], expected, rtol=1e-12, atol=1e-12)


def test_decay_is_each_tasks_own() -> None:
    recipes = [Recipe(weight_decay=decay) for decay in (0.0, 0.1, 0.5)]
    start = flat()
    ours = PerTaskOptimiser(recipes, start.clone(), None, scales=False)
    theirs = [torchs(recipe, own, 0.01) for recipe, own in zip(recipes, start, strict=True)]
    for _ in range(3):
        ours.step(start, column([0.01] * TASKS), torch.ones(TASKS, 1, dtype=torch.bool))
        for optimiser, own in zip(theirs, start, strict=True):
            optimiser.param_groups[0]["params"][0].grad = own.clone()
            optimiser.step()
    expected = torch.stack([each.param_groups[0]["params"][0].detach() for each in theirs])
    torch.testing.assert_close(ours.state["flat"], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_gradient_that_is_not_finite_is_skipped_for_its_task_alone(broken: float) -> None:
    recipes = [Recipe(weight_decay=0.1)] * TASKS
    whole, other = (PerTaskOptimiser(recipes, flat(), 1.0, scales=True) for _ in range(2))
    learns, lr = torch.ones(TASKS, 1, dtype=torch.bool), column([0.1] * TASKS)
    for optimiser in (whole, other):
        optimiser.step(flat(), lr, learns)
    before = {name: tensor.clone() for name, tensor in other.state.items()}
    grad = flat()
    whole.step(grad.clone(), lr, learns)
    grad[1, 5] = broken
    other.step(grad, lr, learns)
    for name, tensor in other.state.items():
        for task in (0, 2):
            assert torch.equal(tensor[task], whole.state[name][task]), (name, task)
        if name not in ("scale", "unbroken"):
            assert torch.equal(tensor[1], before[name][1]), name
    assert other.state["scale"][:, 0].tolist() == [2.0**16, 2.0**15, 2.0**16]


def test_scale_doubles_after_many_steps_that_were_finite() -> None:
    optimiser = PerTaskOptimiser([Recipe()] * TASKS, flat(), None, scales=True)
    learns = torch.tensor([[True], [True], [False]])
    grad = flat()
    for step in range(2000):
        grad[1, 0] = float("inf") if step == 0 else 0.0
        optimiser.step(grad, column([1e-3] * TASKS), learns)
    assert optimiser.state["scale"][:, 0].tolist() == [2.0**17, 2.0**15, 2.0**16]


def test_task_that_is_over_stays_as_it_is() -> None:
    optimiser = PerTaskOptimiser([Recipe(weight_decay=0.5)] * TASKS, flat(), None, scales=False)
    before = optimiser.state["flat"].clone()
    grad = torch.full_like(before, float("nan"))
    grad[0] = 1.0
    learns = torch.tensor([[True], [False], [False]])
    optimiser.step(grad, column([0.1] * TASKS), learns)
    after = optimiser.state["flat"]
    assert not torch.equal(after[0], before[0])
    assert torch.equal(after[1:], before[1:])

"""Gradient projection memory: bases of what old inputs span, and steps that leave it alone."""

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankup
from helpers.zoo import blobs
from rankup.data.streams import make_stream
from rankup.methods.gpm import GPM, extended, outside, roots
from rankup.methods.shared.spaces import Confined, ConfinedLearner, as_matrix, inputs
from rankup.testing import make_method
from rankup.training.batches import Feed
from rankup.training.engine.eager import Eager
from rankup.training.recipe import Recipe

F64, CPU = torch.float64, torch.device("cpu")
STREAM = make_stream("p-digits", tasks=3)
RECIPE = Recipe(epochs=4, batch=32, optimiser="sgd", lr=0.1, schedule="constant", weight_decay=0)
NONE = torch.zeros(())


def make(net: nn.Module | None = None, recipe: Recipe = RECIPE, **options: Any) -> GPM:
    method = make_method("gpm", STREAM, net, options=options, **asdict(recipe))
    assert isinstance(method, GPM)
    return method


def rows(*squares: float) -> Tensor:
    """Rows along coordinates, of these energies."""
    return torch.diag(torch.tensor(squares)).sqrt()


@pytest.mark.parametrize(
    ("share", "directions"),
    [(0.0, 0), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.94, 3), (0.96, 4), (1.0, 4)],
)
def test_the_threshold_picks_the_fewest_directions(share: float, directions: int) -> None:
    """Energies of 50, 30, 15, 5 and nothing, of 100: 50 %, 80 %, 95 % and 100 % are held."""
    basis = extended(torch.zeros(0, 5), rows(15, 50, 0, 5, 30), NONE, share)
    order = [1, 4, 0, 3]
    assert basis.shape == (directions, 5)
    torch.testing.assert_close(basis.abs(), torch.eye(5)[order[:directions]])


def test_what_the_basis_holds_counts() -> None:
    """With 60 of 100 held, one more direction makes 85, two make 100."""
    basis = torch.eye(4)[:1]
    for share, added in ((0.6, 0), (0.61, 1), (0.84, 1), (0.86, 2)):
        found = extended(basis, rows(60, 25, 15, 0), NONE, share)
        assert torch.equal(found[:1], basis)
        torch.testing.assert_close(found[1:].abs(), torch.eye(4)[1 : 1 + added])
    # A rest of which no direction is known is held by none, so others have to make up for it.
    assert len(extended(basis, rows(60, 25, 15, 0), torch.tensor(10.0), 0.78)) == 3
    assert len(extended(basis, rows(60, 25, 15, 0), torch.tensor(8.0), 0.78)) == 2


def test_directions_are_singular_vectors_of_what_the_basis_leaves() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(40, 12, generator=draw, dtype=F64) * torch.logspace(0, -2, 12, dtype=F64)
    old = torch.linalg.qr(torch.randn(12, 3, generator=draw, dtype=F64)).Q.t()
    found = extended(old, roots(x.t() @ x), NONE, 0.99)
    left = x - x @ old.t() @ old
    _, values, vectors = torch.linalg.svd(left, full_matrices=False)
    held = float(x.square().sum() - left.square().sum()) + values.square().cumsum(0)
    count = 1 + int((held < 0.99 * x.square().sum()).sum())
    assert len(found) == 3 + count
    assert 1 < count < 8
    alike = (found[3:] @ vectors[:count].t()).abs()
    torch.testing.assert_close(alike, torch.eye(count, dtype=F64), rtol=0, atol=1e-6)
    torch.testing.assert_close(found @ found.t(), torch.eye(len(found), dtype=F64))


def test_bases_hold_the_inputs_of_all_tasks() -> None:
    """Each to the share of its own time, as a basis only grows."""
    method = make(threshold=0.9, rise=0.03, samples=100_000)
    before = {name: torch.zeros(0, width) for name, width in method.widths.items()}
    for task, share in enumerate((0.9, 0.93, 0.96)):
        method.learn(STREAM[task], None, None)
        seen = layer_inputs(method, STREAM[task])
        for name, basis in method.kept.items():
            assert torch.equal(basis[: len(before[name])], before[name])
            eye = torch.eye(len(basis))
            torch.testing.assert_close(basis @ basis.t(), eye, rtol=0, atol=1e-5)
            x = seen[name]
            within = float((x @ basis.t()).square().sum() / x.square().sum())
            assert within >= share - 1e-6
            if len(basis) > len(before[name]):  # the last direction was needed
                fewer = float((x @ basis[:-1].t()).square().sum() / x.square().sum())
                assert fewer < share
        before = dict(method.kept)


def layer_inputs(method: GPM, task: rankup.Task) -> dict[str, Tensor]:
    """What each hidden layer of an MLP is given, bias included."""
    (x,) = Feed(task, method.recipe, CPU).sample(100_000, torch.Generator().manual_seed(0))
    x, found = x.flatten(1), {}
    for name, layer in method.layers.items():
        found[name] = inputs(layer, x).detach()
        x = torch.relu(layer(x))
    return found


@pytest.mark.parametrize("width", [13, 40])
def test_no_step_changes_outputs_of_inputs_in_the_space(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankup.methods.shared.spaces.WIDE", 20)  # wider ones keep directions
    monkeypatch.setattr("rankup.methods.shared.spaces.MAIN", 8)
    torch.manual_seed(0)
    layer = nn.Linear(width - 1, 6)
    basis = torch.linalg.qr(torch.randn(width, 5, dtype=F64)).Q.t().float()
    inside = torch.randn(50, 5) @ basis
    other = torch.randn(50, width)
    before = [x @ as_matrix(layer).t() for x in (inside, other)]
    confined = Confined(layer, outside(basis))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter))
        confined.after_step()
    after = [x @ as_matrix(layer).t() for x in (inside, other)]
    assert float((after[0] - before[0]).abs().max()) < 1e-4
    assert float((after[1] - before[1]).abs().max()) > 1


def test_a_step_is_the_projected_gradient() -> None:
    """Against plain gradient descent on gradients from which the space is removed."""
    method = make(threshold=0.8)
    method.learn(STREAM[0], None, None)
    learner = method.begin(STREAM[1])
    assert isinstance(learner, ConfinedLearner)
    draws = learner.sample_epoch(torch.Generator().manual_seed(0))
    draws = {name: entries[:5] for name, entries in draws.items()}
    matrices = [as_matrix(layer).double() for layer in method.layers.values()]
    head = {key: p.detach().double().clone() for key, p in method.head.named_parameters()}
    steps = Eager([learner])
    steps.epoch([draws], [[0.1] * 5], 0)
    steps.adopt()
    for rows in draws["rows"]:
        leaves = [m.clone().requires_grad_() for m in (*matrices, *head.values())]
        x = learner.x[rows].flatten(1).double() / 255
        for matrix in leaves[:-2]:
            x = torch.relu(F.pad(x, (0, 1), value=1.0) @ matrix.t())
        F.cross_entropy(x @ leaves[-2].t() + leaves[-1], learner.y[rows]).backward()
        grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
        for number, basis in enumerate(method.kept.values()):
            rows64 = basis.double()
            assert 0 < len(basis) < basis.shape[1]
            matrices[number] = matrices[number] - 0.1 * (
                grads[number] - grads[number] @ rows64.t() @ rows64
            )
        for key, grad in zip(head, grads[-2:], strict=True):
            head[key] -= 0.1 * grad
    for layer, expected in zip(method.layers.values(), matrices, strict=True):
        torch.testing.assert_close(as_matrix(layer).double(), expected, rtol=0, atol=1e-5)


def moved(first: rankup.Task, later: rankup.Task, **options: Any) -> float:
    """How far the answers for a task move while another one is learned."""
    recipe = replace(RECIPE, epochs=20, batch=10)
    method = make(rankup.models.mlp(64, hidden=[32, 32]), recipe, **options)
    method.learn(first, None, None)
    ((x, _),) = Feed(first, recipe, CPU).train(2048)
    before = method.predict(x, 0)
    method.learn(later, None, None)
    return float((method.predict(x, 0) - before).detach().norm())


def test_where_bases_hold_all_inputs_old_answers_stay() -> None:
    """Twenty inputs span a proper subspace of what every layer reads."""
    first, later = blobs(0, 64, samples=20), blobs(1, 64)
    assert moved(first, later, threshold=1.0) < 1e-3 * moved(first, later, threshold=0.0, rise=0)


def test_few_samples_are_looked_at() -> None:
    bases = {}
    for samples in (3, 50):
        method = make(threshold=1.0, samples=samples)
        method.begin(STREAM[0])
        method.end()
        bases[samples] = [len(basis) for basis in method.kept.values()]
    assert bases[3] == [3, 3]
    assert min(bases[50]) > 3


def test_a_wide_layers_basis_is_that_of_a_narrow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for wide in (4096, 64):
        monkeypatch.setattr("rankup.methods.shared.spaces.WIDE", wide)
        monkeypatch.setattr("rankup.methods.shared.spaces.MAIN", 60)
        method = make(threshold=0.95)
        for task in STREAM.tasks[:2]:
            method.learn(task, None, None)
        found.append(method.kept["hidden.0"])
    narrow, directions = found
    assert narrow.shape == directions.shape
    torch.testing.assert_close(narrow.t() @ narrow, directions.t() @ directions, rtol=0, atol=1e-2)


def test_shares_end_at_everything() -> None:
    method = make(threshold=0.9, rise=0.5)
    for task in STREAM.tasks[:2]:
        method.learn(task, None, None)
    x = layer_inputs(method, STREAM[1])["hidden.0"]
    basis = method.kept["hidden.0"]
    assert len(basis) <= basis.shape[1]
    assert float((x @ basis.t()).square().sum() / x.square().sum()) > 0.9999

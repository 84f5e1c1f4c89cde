"""VeRA: two vectors of scales around two random matrices that all layers share."""

import pytest
import torch

import rankup
from helpers.rivals import commit_drawn, toys
from rankup import seeds
from rankup.methods.vera import Vera, VeraWeight
from rankup.metrics import Footprint
from rankup.testing import make_method

STREAM = rankup.data.Stream("toys", tuple(toys(20)))
DIRECTIONS, HIDDEN = 30, [12, 25, 9]


def make() -> Vera:
    module = rankup.models.mlp(20, hidden=HIDDEN)
    made = make_method("vera", STREAM, module, options={"directions": DIRECTIONS})
    assert isinstance(made, Vera)
    return made


def layers(method: Vera) -> list[VeraWeight]:
    return [part for part in method.parts if isinstance(part, VeraWeight)]


@pytest.mark.parametrize("task", [0, 1])
def test_weight_is_the_papers_formula(task: int) -> None:
    method = make()
    for each in STREAM.tasks[: task + 1]:
        commit_drawn(method, each)
    for layer in layers(method):
        b, d = (layer.vector(key, task) for key in "bd")
        diagonals = torch.diag(b.double()), torch.diag(d.double())
        wanted = diagonals[0] @ layer.B.double() @ diagonals[1] @ layer.A.double()
        torch.testing.assert_close(layer.weight(task).double(), wanted, rtol=1e-5, atol=1e-5)


def test_all_layers_share_both_matrices() -> None:
    """But for their scale."""
    method = make()
    for layer, inputs in zip(layers(method), (20, *HIDDEN), strict=False):
        outputs = layer.spec.outputs
        A, B = (seeds.uniform(0, "vera", key, 25, DIRECTIONS) for key in "AB")
        for got, all_of_it in ((layer.A.t(), A[:inputs]), (layer.B, B[:outputs])):
            assert got.shape == all_of_it.shape
            torch.testing.assert_close(got, all_of_it * (got[0, 0] / all_of_it[0, 0]))


def test_a_task_stores_a_number_for_each_direction_and_two_for_each_output() -> None:
    method, head = make(), HIDDEN[-1] * 3 + 3
    for tasks in (1, 2):
        commit_drawn(method, STREAM[tasks - 1])
        of_layers = sum(DIRECTIONS + 2 * outputs for outputs in HIDDEN)
        assert method.footprint() == Footprint(tasks * (of_layers + head))

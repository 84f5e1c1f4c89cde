"""RandLoRA: scaled random blocks of low rank whose sum has full rank."""

import math

import pytest
import torch

import rankup
from helpers.rivals import commit_drawn, toys
from rankup import seeds
from rankup.methods.randlora import BlocksWeight, RandLora
from rankup.metrics import Footprint
from rankup.testing import make_method

STREAM = rankup.data.Stream("toys", tuple(toys(20)))
HIDDEN = [12, 25, 9]
SHORT = [12, 12, 9]  # the shorter side of 20 to 12, 12 to 25 and 25 to 9


def make(rank: int = 5) -> RandLora:
    module = rankup.models.mlp(20, hidden=HIDDEN)
    made = make_method("randlora", STREAM, module, options={"block_rank": rank})
    assert isinstance(made, RandLora)
    return made


def layers(method: RandLora) -> list[BlocksWeight]:
    return [part for part in method.parts if isinstance(part, BlocksWeight)]


@pytest.mark.parametrize("task", [0, 1])
def test_weight_is_the_papers_sum(task: int) -> None:
    method = make()
    for each in STREAM.tasks[: task + 1]:
        commit_drawn(method, each)
    for layer in layers(method):
        lambdas, gammas = (layer.vector(key, task).double() for key in ("lambdas", "gammas"))
        A, blocks = layer.A.double(), layer.B.double().split(5, dim=1)
        wanted = sum(
            block @ torch.diag(of_block) @ A @ torch.diag(of_columns)
            for block, of_block, of_columns in zip(blocks, lambdas, gammas, strict=True)
        )
        assert isinstance(wanted, torch.Tensor)
        wanted = wanted.t() if layer.spec.inputs > layer.spec.outputs else wanted
        torch.testing.assert_close(layer.weight(task).double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [1, 5, 12, 40])
def test_the_sum_has_full_rank_where_a_block_has_not(rank: int) -> None:
    method = make(rank)
    commit_drawn(method, STREAM[0])
    for layer, short in zip(layers(method), SHORT, strict=True):
        assert int(torch.linalg.matrix_rank(layer.weight(0))) == short
        lambdas, gammas = layer.vector("lambdas", 0), layer.vector("gammas", 0)
        one = layer.B[:, :rank] * lambdas[0] @ layer.A * gammas[0]
        assert int(torch.linalg.matrix_rank(one)) == min(rank, short)


def test_all_layers_share_all_matrices() -> None:
    """But for their scale."""
    for layer, short in zip(layers(make()), SHORT, strict=True):
        A = seeds.uniform(0, "randlora", "A", 25, 5)[:short].t()
        long = max(layer.spec.inputs, layer.spec.outputs)
        blocks = [seeds.uniform(0, "randlora", f"B{j}", 25, 5)[:long] for j in range(3)]
        B = torch.cat(blocks[: math.ceil(short / 5)], 1)
        for got, all_of_it in ((layer.A, A), (layer.B, B)):
            assert got.shape == all_of_it.shape
            torch.testing.assert_close(got, all_of_it * (got[0, 0] / all_of_it[0, 0]))


@pytest.mark.parametrize(("rank", "blocks"), [(1, [12, 12, 9]), (5, [3, 3, 2]), (40, [1, 1, 1])])
def test_a_task_stores_scales_of_every_block(rank: int, blocks: list[int]) -> None:
    method, head = make(rank), HIDDEN[-1] * 3 + 3
    for tasks in (1, 2):
        commit_drawn(method, STREAM[tasks - 1])
        scales = sum(n * (rank + short) for n, short in zip(blocks, SHORT, strict=True))
        assert method.footprint() == Footprint(tasks * (scales + sum(HIDDEN) + head))

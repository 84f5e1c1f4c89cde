"""Two processes learn one network: gradients, committed bits, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import rank_jobs
from helpers.ranks import run_ranks

Found = dict[str, list[Any]]

JOBS = [
    *("plain_gradients", "norm_gradients", "own_loop", "own_loop_int8", "stale_wrapper"),
    *("without_deciding", "each_its_own", "different_steps", "different_networks"),
    *("gradients_of_some", "batches_of_one_fail", "fit_two", "fit_uneven", "fit_int8"),
    *("fit_chain", "fit_diverges"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_ranks(tmp_path_factory.mktemp("ranks"), "helpers.rank_jobs", JOBS)


def gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one if one[name].numel())


@pytest.mark.parametrize("job", ["plain_gradients", "norm_gradients"])
def test_gradients_are_those_of_one_process(found: Found, job: str) -> None:
    """In float64; with batch norms the whole batch is normalised as one."""
    alone = getattr(rank_jobs, job)()
    for rank in found[job]:
        assert gap(rank, alone) < 1e-12


@pytest.mark.parametrize("job", ["own_loop", "own_loop_int8"])
def test_own_loop_commits_the_same_bits(found: Found, job: str) -> None:
    one, other = found[job]
    assert gap(one, other) == 0
    if job == "own_loop":
        # Statistics are those of all samples: in one process, of both halves as two batches.
        assert gap(one, rank_jobs.own_loop()) < 1e-6


def test_stale_wrapper_does_no_harm(found: Found) -> None:
    one, other = found["stale_wrapper"]
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    assert len(one) > 5


@pytest.mark.parametrize("job", ["fit_two", "fit_uneven", "fit_int8", "fit_chain"])
def test_fit_commits_the_same_bits_as_good_as_in_one_process(found: Found, job: str) -> None:
    (state, logits), (other, _) = found[job]
    assert gap(state, other) == 0
    _, alone = getattr(rank_jobs, job)()
    assert float((logits - alone).abs().max()) < (0.5 if job == "fit_int8" else 2e-3)


@pytest.mark.parametrize(
    ("job", "sentence"),
    [
        ("without_deciding", "call net.distribute() if all learn"),
        ("different_steps", "processes have different values of body.conv.new_"),
        ("different_networks", "grow the same module with the same seed"),
        ("gradients_of_some", "has a gradient in some processes only"),
    ],
)
def test_what_is_wrong_is_refused_by_all(found: Found, job: str, sentence: str) -> None:
    for rank in found[job]:
        assert rank.startswith("refused: ")
        assert sentence in rank


def test_failure_of_one_ends_all(found: Found) -> None:
    first, second = found["batches_of_one_fail"]
    assert first == "refused: process 1 could not run its batches of calibrate"
    assert "shape" in second


def test_diverged_task_is_abandoned_by_all(found: Found) -> None:
    for rank in found["fit_diverges"]:
        assert "refused: task 'split 01' diverged" in rank


def test_each_may_learn_its_own(found: Found) -> None:
    assert all(isinstance(rank, Tensor) for rank in found["each_its_own"])


def test_one_process_needs_no_group(tmp_path: Path) -> None:
    net = rank_jobs.small(True)
    assert net.distribute() is net
    assert net.ranks is None

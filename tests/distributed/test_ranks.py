"""Two processes learn one network: gradients, committed bits, and what is refused."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rankup
from helpers import rank_jobs
from helpers.calling import Call
from helpers.ranks import run_ranks
from rankup.distributed.ranks import Ranks
from rankup.runs.read import read_run

Found = dict[str, list[Any]]

JOBS = [
    *("plain_gradients", "norm_gradients", "own_loop", "own_loop_int8", "stale_wrapper"),
    *("without_deciding", "each_its_own", "different_steps", "different_networks"),
    *("gradients_of_some", "batches_of_one_fail", "fit_two", "fit_uneven", "fit_int8"),
    *("fit_chain", "fit_pruned", "fit_diverges", "fully_sharded", "sharded"),
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


def test_processes_drop_the_same_numbers(found: Found) -> None:
    one, other = found["fit_pruned"]
    assert gap(one, other) == 0
    assert any(bool((table == 0).any()) for name, table in one.items() if name.endswith("weights"))


@pytest.mark.parametrize(
    ("job", "sentence"),
    [
        ("without_deciding", "call net.distribute() if all learn"),
        ("different_steps", "processes have different values of body.conv.new_"),
        ("different_networks", "grow the same module with the same seed"),
        ("fully_sharded", "divide its base with net.distribute(shard=True)"),
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


def test_divided_base_answers_the_same_with_less_memory(found: Found) -> None:
    """Two tasks on a base of twelve equal layers, saved, loaded and divided again: half of it and
    one layer is in memory at most."""
    one, mixed, share = rank_jobs.sharded()
    assert share == 1
    for logits, mixed_logits, peak in found["sharded"]:
        assert float((logits - one).abs().max() / one.abs().max()) < 1e-5
        assert float((mixed_logits - mixed).abs().max() / one.abs().max()) < 1e-5
        assert peak == pytest.approx(1 / 2 + 1 / 12)


def test_torchrun_divides_a_run(tmp_path: Path) -> None:
    """One process writes; as good as in one process, and refused where it cannot be divided."""
    short = ("--stream", "s-digits", "--tasks", "2", "--epochs", "2", "--width", "16")
    done = torchrun("run", *short, "--out", str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("A page with plots") == 1
    alone = rankup.run("rank", "s-digits", tasks=2, epochs=2, width=16, threads=1)
    run = read_run(tmp_path / "two")
    for one, other in zip(run.matrix.rows, alone.accuracy, strict=True):
        assert one == pytest.approx(other, abs=0.02)


def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(Path(rankup.__file__).parents[1])}
    env |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    return subprocess.run(
        [*launch, "--standalone", "-m", "rankup", *words],
        env=env,
        capture_output=True,
        text=True,
        timeout=180,
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--method", "ewc"], "only the method rank can be divided among processes, not ewc"),
        (["--seeds", "2"], "leave --seeds and --on out"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    words: list[str], sentence: str, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("rankup.cli.run.process_group", lambda _: nullcontext(Ranks(0, 2)))
    monkeypatch.setattr(Ranks, "of_first", lambda _, value: value)
    done = call("run", "--tasks", 2, "--out", tmp_path / "run", *words)
    assert done.code == 1
    assert sentence in done.err

"""`rankup.run`: any method in one call, the same as by the command."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import rankup
from helpers.calling import Call
from helpers.runs import outcome
from rankup.data.streams import Stream, make_stream
from rankup.methods import METHODS
from rankup.runs.records import read_lines
from rankup.runs.seed_run import Progress

TINY = {"tasks": 2, "epochs": 2, "width": 16, "batch": 32}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """A call leaves the caller's number of threads alone."""
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_with_and_without_a_folder(method: str, tmp_path: Path) -> None:
    result = rankup.run(method, "p-digits", **TINY)
    written = rankup.run(method, "p-digits", out=tmp_path / "run", **TINY)
    lines = read_lines(tmp_path / "run")
    assert result.accuracy == written.accuracy == [line["accuracy"] for line in lines]
    assert result.tasks == ["permutation 01", "permutation 02"]
    assert result.average_accuracy == lines[-1]["average_accuracy"]
    assert result.forgetting == lines[-1]["forgetting"]
    assert (result.parameters, result.buffer) == (lines[-1]["parameters"], lines[-1]["buffer"])
    assert result.method.learned == 2


@pytest.mark.parametrize(
    ("method", "options"), [("rank", {"reuse": False}), ("ewc", {"strength": 10.0})]
)
def test_it_equals_the_command(
    method: str,
    options: dict[str, Any],
    call: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rankup.cli.run.show_runs", lambda *_: None)
    before = torch.get_num_threads()
    said = [f"--{name}={value}" for name, value in {**TINY, **options}.items() if name != "reuse"]
    said += ["--no-reuse"] * ("reuse" in options)
    done = call("run", "--method", method, *said, "--seed", 3, "--out", tmp_path / "command")
    assert done.code == 0, done.err
    torch.set_num_threads(before)
    out = tmp_path / "python"
    result = rankup.run(method, "p-digits", seed=3, out=out, **TINY, **options)
    assert outcome(out) == outcome(tmp_path / "command")
    configs = [(folder / "config.json").read_bytes() for folder in (out, tmp_path / "command")]
    assert configs[0] == configs[1]
    in_memory = rankup.run(method, "p-digits", seed=3, **TINY, **options)
    assert in_memory.accuracy == result.accuracy


def test_a_stream_of_ones_own_may_go_on(tmp_path: Path) -> None:
    tasks = make_stream("p-digits", tasks=2).tasks
    mine, told = Stream("mine", tasks), list[Progress]()
    whole = rankup.run(stream=mine, epochs=4, width=16, on_progress=told.append)
    assert whole.method.net.tasks == ["permutation 01", "permutation 02"]
    assert {now.task for now in told} == {0, 1}
    short = {"epochs": 4, "width": 16, "out": tmp_path / "run"}
    rankup.run(stream=mine.first(1), **short)
    assert rankup.run(stream=mine, resume=True, **short).accuracy == whole.accuracy
    other = Stream("mine", tuple(replace(task, train_y=task.train_y.flip(0)) for task in tasks))
    with pytest.raises(rankup.RankupError, match="the images of mine have changed since"):
        rankup.run(stream=other, resume=True, **short)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "none"}, "there is no method 'none'"),
        ({"method": "ewc", "gama": 1.0}, "'gama' is not an option of ewc, which has strength"),
        ({"method": "ewc", "rank": "3,1"}, "rank is for the method rank, ewc has no factors"),
        ({"net": "cnn"}, "net must be one of mlp, resnet18, .*, got 'cnn'"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"stream": Stream("mine", ()), "tasks": 3}, "tasks is for a stream that is named"),
    ],
)
def test_bad_arguments_get_a_sentence(given: dict[str, Any], message: str) -> None:
    with pytest.raises(rankup.RankupError, match=message):
        rankup.run(**given)


def test_less_rank_than_asked_for_is_said() -> None:
    with pytest.warns(UserWarning, match="rank"):
        rankup.run(rank="40,1", **TINY)

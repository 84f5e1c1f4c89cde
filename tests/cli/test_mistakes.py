"""Likely mistakes in the first calls get one clear sentence."""

import re
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import rankup
from rankup.cli.main import app, main
from rankup.data import Task, make_stream
from rankup.runs.request import Request
from rankup.training.recipe import RECIPES

NET = rankup.grow(rankup.models.mlp(64, hidden=[16]), rankup.Rank(2, 1))
TASK = make_stream("p-digits", tasks=1)[0]
X, Y = torch.rand(4, 64), torch.tensor([0, 1, 2, 0])

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "bytes": (lambda: NET(TASK.test_x, task=0), "torch.uint8, but the network computes in"),
    "an array": (lambda: Task("m", 3, np.zeros((4, 64)), Y, X, Y), "must be a tensor, got ndarray"),
    "a list": (lambda: Task("m", 3, X, [0, 1, 2, 0], X, Y), "labels must be a tensor, got list"),
    "a pair": (lambda: rankup.fit(NET, (X, Y)), "fit takes a rankup.data.Task, got tuple"),
    "a pair to test": (lambda: rankup.accuracy(NET, (X, Y)), "accuracy takes a rankup.data.Task, "),
    "a name": (lambda: rankup.fit(NET, TASK, "default"), "fit takes a rankup.Recipe, got str"),
    "a number": (lambda: rankup.models.mlp(64, hidden=256), "hidden=256"),
    "less than nothing": (lambda: rankup.models.mlp(64, hidden=[-3]), r"hidden=\[-3\]"),
    "no inputs": (lambda: rankup.models.mlp(0), "got 0 inputs"),
    "no width": (lambda: rankup.models.resnet18(0), "at least 1 as width, got 0"),
    "half a width": (lambda: rankup.models.resnet18(2.5), "at least 1 as width, got 2.5"),
    "a plain module": (lambda: rankup.fit(NET.body, TASK), "a network made by rankup.grow"),
    "a module to test": (lambda: rankup.accuracy(NET.body, TASK), "made by rankup.grow, got MLP"),
    "a word as a seed": (lambda: rankup.fit(NET, TASK, seed="x"), "a whole number, got 'x'"),
    "a path to resume": (lambda: rankup.fit(NET, TASK, resume="x"), "from a Checkpoint, got str"),
    "no pixels": (lambda: rankup.data.load_source(".", side=0), "side must be .* got 0"),
    "several to merge": (lambda: NET.merged([0, 1]), r"a name or an index, got \[0, 1\]"),
    "a stream's number": (lambda: make_stream(3), "a stream is given by its name, got int"),
}


@pytest.mark.parametrize("given", REFUSED)
def test_a_likely_mistake_is_named(given: str) -> None:
    call, words = REFUSED[given]
    with pytest.raises(rankup.RankupError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert NET.learning is None


def test_the_version_is_told() -> None:
    answer = CliRunner().invoke(app, ["--version"])
    assert (answer.exit_code, answer.output) == (0, f"rankup {rankup.__version__}\n")


def test_results_that_are_not_there_are_not_shown(tmp_path: Path) -> None:
    words = ["paper", "accuracy", "--show", "--results", str(tmp_path / "nowhere")]
    answer = CliRunner().invoke(app, words)
    assert "there is no results folder" in str(answer.exception)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["accuracy", "--show", "--only", "ewc"], "--only chooses what to run, but --show runs"),
        (["--results", __file__], "--results must be a folder, but .* is a file"),
    ],
)
def test_what_cannot_be_shown_is_said(words: list[str], said: str) -> None:
    answer = CliRunner().invoke(app, ["paper", *words])
    assert re.search(said, str(answer.exception))


def test_too_little_memory_is_said_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["rankup", "run", "--width", str(10**15), "--tasks", "1", "--out", str(tmp_path / "a")]
    monkeypatch.setattr("sys.argv", words)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="1"):
        main()
    signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == "rankup: there is too little memory for it\n"


def test_a_folder_of_a_stream_of_ones_own_has_a_plain_name() -> None:
    assert Request(stream="split:photos/birds").folder("tune").name == "tune-split-photos_birds"


def test_a_folder_of_a_long_path_has_a_short_name_that_others_do_not_have() -> None:
    places = ["a" * 90, "b" * 90, "a" * 40 + "/" + "a" * 49]
    streams = [f"split:{place}/{'é' * 90}@64" for place in places]
    names = [Request(stream=stream).folder("compare").name for stream in streams]
    assert len(set(names)) == 3
    assert all(name.startswith("compare-split-éééé") for name in names)
    assert all(len(name.encode()) < 100 for name in names)


def test_the_help_tells_recipes_apart() -> None:
    answer = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "400"})
    for name, what in RECIPES.items():
        assert f"{name} ({what})" in answer.output


def test_choices_are_in_the_help() -> None:
    answer = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "120"})
    for choices in ("<adam|sgd>", "<full|float16|int8>", "<mlp|resnet18>"):
        assert choices in answer.output


def test_folders_of_seeds_and_of_rivals_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    little = ["--tasks", "2", "--epochs", "1", "--width", "16", "--device", "cpu"]
    for seed in ("0", "1"):
        out = str(tmp_path / "ours" / f"seed-{seed}")
        assert (
            CliRunner().invoke(app, ["run", *little, "--seed", seed, "--out", out]).exit_code == 0
        )
    told = CliRunner().invoke(app, ["report", str(tmp_path / "ours")]).output
    assert "mean of 2" in told
    assert (tmp_path / "ours" / "report.html").exists()
    rival = str(tmp_path / "rival")
    CliRunner().invoke(app, ["run", "--method", "finetune", *little, "--out", rival])
    for command in ("info", "verify"):
        answer = CliRunner().invoke(app, [command, rival])
        assert "is a run of finetune, but only a run of rank has a network" in str(answer.exception)

"""Commands other than `run`: lists, help, and what is told about runs and networks."""

import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rankup
from helpers.calling import Call
from helpers.command import ENV
from helpers.damage import edit_config
from rankup.cli.main import COMMANDS, app
from rankup.data import STREAMS
from rankup.methods import METHODS
from rankup.training.recipe import RECIPES


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of the rank update and one of fine-tuning."""
    root = tmp_path_factory.mktemp("cli")
    for method in ("rank", "finetune"):
        words = f"run --tasks 2 --epochs 3 --width 16 --method {method} --out {root}/{method}"
        done = CliRunner().invoke(app, words.split())
        assert done.exit_code == 0, done.output
    return root


def test_runs_side_by_side(runs: Path, tmp_path: Path, call: Call) -> None:
    page = tmp_path / "both.html"
    done = call("report", runs / "rank", runs / "finetune", "--out", page)
    assert done.code == 0, done.err
    assert re.search(r"rank +\d+\.\d\d +0\.00", done.out)
    assert re.search(r"finetune +\d+\.\d\d +[1-9]\d*\.\d\d", done.out)
    assert page.stat().st_size > 10_000


def test_folder_of_seeds_is_shown_with_their_mean(runs: Path, tmp_path: Path, call: Call) -> None:
    for seed in (0, 1):
        edit_config(shutil.copytree(runs / "rank", tmp_path / f"seed-{seed}"), seed=seed)
    assert "mean of 2" in call("report", tmp_path).out
    assert (tmp_path / "report.html").exists()


def test_info_shows_layers_tasks_and_size(
    runs: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = call("info", runs / "rank").out
    assert "permutation 01" in info
    assert re.search(r"2 tasks, [\d,]+ numbers stored", info)
    monkeypatch.setenv("COLUMNS", "40")
    narrow = call("info", runs / "rank").out
    assert "…" not in narrow
    assert {"hidden.0", "hidden.1", "outputs", "seeded"} <= set(narrow.split())


def test_verify_tells_whole_from_broken(runs: Path, tmp_path: Path, call: Call) -> None:
    whole = call("verify", runs / "rank")
    said = "whole: 2 tasks, every file as it was written\n"
    assert (whole.code, whole.out.split(" is ")[1]) == (0, said)
    shutil.copytree(runs / "rank", tmp_path / "run")
    os.truncate(next((tmp_path / "run" / "net" / "tasks").iterdir()), 50)
    broken = call("verify", tmp_path / "run")
    assert broken.code == 1
    assert "is truncated: 50 of" in broken.err


def test_rival_has_no_network_to_tell_about(runs: Path, call: Call) -> None:
    done = call("info", runs / "finetune")
    assert "is a run of finetune, but only a run of rank has a network" in done.err


def test_methods_and_streams_are_listed(call: Call) -> None:
    assert call("methods", "--plain").out.split() == list(METHODS)
    assert call("streams", "--plain").out.split() == list(STREAMS)
    assert "never forgets" in call("methods").out
    assert "split:PATH" in call("streams").out


def test_version(call: Call) -> None:
    assert call("--version") == (0, f"rankup {rankup.__version__}\n", "")


def test_help_lists_all_commands_without_torch() -> None:
    code = "import sys; from rankup.cli.main import app; app(['--help'], standalone_mode=False)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('torch' in sys.modules)"],
        env=ENV,
        capture_output=True,
        text=True,
    )
    assert done.stdout.endswith("False\n"), done.stderr
    listed = re.findall(r"^│ (\w+) ", done.stdout, re.M)
    assert listed == list(COMMANDS)


def test_nothing_asked_is_help_asked(call: Call) -> None:
    assert call() == call("--help")
    assert call().code == 0


def test_run_imports_no_other_command() -> None:
    code = "import sys; from rankup.cli.main import app; app(['run', '-h'], standalone_mode=False)"
    others = {f"rankup.cli.{name}" for name in COMMANDS} - {"rankup.cli.run", "rankup.cli.report"}
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print({others!r} & sys.modules.keys())"],
        env=ENV,
        capture_output=True,
        text=True,
    )
    assert done.stdout.endswith("set()\n"), done.stderr


def test_help_names_recipes_and_choices(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    help = call("run", "--help").out
    for name, what in RECIPES.items():
        assert f"{name} ({what})" in help
    for choices in ("<adam|sgd>", "<full|float16|int8>"):
        assert choices in help


def test_help_in_a_terminal_without_unicode(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert call("run", "-h").code == 0
    assert b"Learn a stream task after task" in written.getvalue()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("ver", ["verify"]),
        ("run --stream p-", ["p-digits", "p-mnist"]),
        ("run --method pa", ["packnet", "parallel"]),
        ("compare --methods rank,er", ["rank,er-ring"]),
        ("paper res", ["resnet18"]),
    ],
)
def test_shell_completes_names(
    typed: str, offered: list[str], call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"rankup {typed}"
    monkeypatch.setenv("_RANKUP_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", f"{len(words.split()) - 1}")
    assert call().out.split() == offered

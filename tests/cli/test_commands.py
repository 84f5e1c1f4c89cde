"""The command line as a person uses it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.calling import Call
from helpers.command import (
    ENV,
    rankup,
)
from rankup.cli.run import _failed
from rankup.data import STREAMS
from rankup.methods import METHODS

QUICK = ("--tasks", 2, "--epochs", 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each method."""
    folder = tmp_path_factory.mktemp("cli")
    for method in ("rank", "finetune"):
        done = rankup("run", "--method", method, *QUICK, "--width", 32, cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


def test_a_run_prints_its_table_and_writes_its_folder(folder: Path) -> None:
    run = folder / "runs" / "p-digits-rank-0"
    assert {p.name for p in run.iterdir()} >= {"config.json", "metrics.jsonl", "net", "report.html"}
    again = rankup("run", *QUICK, "--width", 32, "--resume", cwd=folder)
    assert again.returncode == 0, again.stderr
    assert "permutation 02" in again.stdout
    assert re.search(r"average +\d+\.\d\d +\d+\.\d\d +0\.00", again.stdout)
    assert "report.html" in again.stdout
    assert max(map(len, again.stdout.splitlines()[:-1])) <= 80


def test_runs_side_by_side(folder: Path) -> None:
    runs = ["runs/p-digits-rank-0", "runs/p-digits-finetune-0"]
    done = rankup("report", *runs, "--out", "both.html", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert re.search(r"rank +\d+\.\d\d +0\.00", done.stdout)
    assert re.search(r"finetune +\d+\.\d\d +[1-9]\d*\.\d\d", done.stdout)
    assert (folder / "both.html").stat().st_size > 10_000


def test_info_and_verify(folder: Path) -> None:
    info = rankup("info", "runs/p-digits-rank-0", cwd=folder)
    assert "permutation 01" in info.stdout
    assert re.search(r"2 tasks, [\d,]+ numbers stored", info.stdout)
    narrow = rankup("info", "runs/p-digits-rank-0", cwd=folder, COLUMNS="40").stdout
    assert "…" not in narrow
    assert {"hidden.0", "hidden.1", "outputs", "seeded"} <= set(narrow.split())
    whole = rankup("verify", "runs/p-digits-rank-0", cwd=folder)
    assert (whole.returncode, whole.stdout.split(" is ")[1]) == (
        0,
        "whole: 2 tasks, every file as it was written\n",
    )


def test_verify_fails_on_a_broken_network(folder: Path, tmp_path: Path) -> None:
    subprocess.run(["cp", "-r", folder / "runs" / "p-digits-rank-0", tmp_path / "run"], check=True)
    task = next((tmp_path / "run" / "net" / "tasks").iterdir())
    os.truncate(task, 50)
    broken = rankup("verify", tmp_path / "run", cwd=tmp_path)
    assert broken.returncode == 1
    assert "is truncated: 50 of" in broken.stderr


def test_lists(tmp_path: Path) -> None:
    assert rankup("methods", "--plain", cwd=tmp_path).stdout.split() == list(METHODS)
    assert rankup("streams", "--plain", cwd=tmp_path).stdout.split() == list(STREAMS)
    assert "never forgets" in rankup("methods", cwd=tmp_path).stdout


def test_help_is_instant_and_teaches(tmp_path: Path) -> None:
    before = os.times()
    helped = rankup("--help", cwd=tmp_path)
    after = os.times()
    # CPU time, which other processes hardly affect: 0.2 s; torch alone takes over 1 s.
    assert after.children_user - before.children_user < 0.8
    for command in ("run", "compare", "report", "info", "verify", "streams", "methods"):
        assert command in helped.stdout
    loaded = subprocess.run(
        [sys.executable, "-c", "import rankup.cli.main, sys; print('torch' in sys.modules)"],
        env=ENV,
        capture_output=True,
        text=True,
    )
    assert loaded.stdout == "False\n"


REFUSED = {
    "stream": (
        ["run", "--stream", "p-digit"],
        "there is no stream 'p-digit' .did you mean p-digits",
    ),
    "method": (["run", "--method", "magic"], "there is no method 'magic', only rank, finetune"),
    "recipe": (["run", "--recipe", "best"], "there is no recipe 'best', only default, paper"),
    "optimiser": (
        ["run", "--method", "agem", "--optimiser", "adam", "--out", "x"],
        "agem projects the gradient, so it needs the optimiser .* sgd, not adam",
    ),
    "schedule": (["run", "--schedule", "linear"], "schedule must be one of one-cycle, constant"),
    "rank": (["run", "--rank", "11"], "rank must be written like 11,1 or 0.1,0.02"),
    "negative rank": (["run", "--rank", "-1,1"], "first must not be negative, got -1"),
    "no factors": (["run", "--rank", "0,0"], "first=0 needs seeded factors"),
    "tasks": (["run", "--tasks", "0"], "tasks must be a whole number of at least 1, got 0"),
    "missing data": (["run", "--stream", "p-mnist"], "--data"),
    "diverging": (
        ["run", "--lr", "1e30", "--tasks", "1", "--out", "x"],
        "'permutation 01' diverged",
    ),
    "cropped": (
        ["run", "--crop", "9", "--out", "x"],
        "images of 8×8 pixels can be padded by reflection by 0 to 7 pixels, got 9",
    ),
    "a file": (["run", "--out", "file"], "file is a file, not a folder: name a folder with --out"),
    "no run": (["report", "nowhere"], "nowhere"),
    "no network": (["info", "nowhere"], "there is no folder nowhere"),
    "no factors at all": (
        ["run", "--method", "ewc", "--rank", "3,1"],
        "--rank is for the method rank, ewc has no factors",
    ),
    "no factors to start": (
        ["run", "--method", "hat", "--first-factors", "3"],
        "--first-factors is for the method rank, hat has no factors",
    ),
    "nobody to soften": (
        ["run", "--softness", "2"],
        "--softness is for learning from a teacher: name one with --teacher",
    ),
    "a page of nothing": (["paper", "--page", "x.md"], "--page needs a table or figure: name"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_gets_one_sentence_and_a_non_zero_exit(case: str, tmp_path: Path) -> None:
    arguments, message = REFUSED[case]
    (tmp_path / "file").touch()
    done = rankup(*arguments, cwd=tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("rankup: ")
    assert re.search(message, last), last
    assert "Traceback" not in done.stderr
    assert case != "diverging" or "what was learned before" not in last  # there is nothing
    if case in ("optimiser", "cropped"):  # nothing is in the way of another try
        assert not (tmp_path / "x").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
@pytest.mark.parametrize("arguments", [["methods"], ["--version"], ["streams", "--plain"]])
def test_an_output_that_cannot_be_written_is_said(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rankup", *arguments],
            env=ENV,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr == "rankup: the output cannot be written: No space left on device\n"


def test_without_an_output_nothing_is_missed() -> None:
    command = ["sh", "-c", '"$0" -m rankup "$@" >&-', sys.executable]
    for arguments in (["streams"], ["methods", "--plain"], ["--version"]):
        done = subprocess.run([*command, *arguments], env=ENV, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_names_that_are_too_long_are_said(call: Call) -> None:
    name = 300 * "a"
    for arguments in (("info", name), ("report", name), ("run", "--stream", f"split:{name}")):
        done = call(*arguments)
        assert done.code == 1
        assert re.fullmatch(f"rankup: {name}.* cannot be used: File name too long\n", done.err)


@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", ["checked_page", "write_report"])
def test_what_is_stopped_while_no_bars_are_shown_says_so(
    where: str, number: int, folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        signal.raise_signal(number)

    monkeypatch.setattr(f"rankup.report.page.{where}", stop)
    done = call("report", folder / "runs" / "p-digits-rank-0")
    assert (done.code, done.err) == (130, "rankup: stopped\n")


def test_a_method_has_a_recipe_of_its_own_but_for_what_is_given(tmp_path: Path) -> None:
    command = ("run", "--method", "agem", "--lr", 0.2, "--tasks", 1, "--epochs", 5, "--out", "x")
    done = rankup(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    recipe = json.loads((tmp_path / "x" / "config.json").read_text())["recipe"]
    assert (recipe["optimiser"], recipe["schedule"], recipe["lr"]) == ("sgd", "constant", 0.2)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (
            "run --net vgg",
            r"'--net': .*'vgg' is not one of 'mlp', 'resnet18'.* \(see rankup run --help",
        ),
        ("run --width -3", "'--width': .*got '-3'|'--width': -3 is not"),
        ("run --width=0", "'--width': .*got '0'|'--width': 0 is not"),
        ("run --epochs 1.5", "'--epochs': .*'1.5'"),
        ("run --epochs", "'--epochs' requires an argument"),
        ("run --nope 3", "no such option.*--nope"),
        ("rnu", "no such command 'rnu'.*see rankup --help"),
        ("report", "missing argument"),
        ("methods more", "unexpected extra argument"),
    ],
)
def test_what_cannot_be_understood_is_said_in_one_line(typed: str, says: str, call: Call) -> None:
    done = call(*typed.split())
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(f"rankup: .*({says}).*\n", done.err), done.err


def test_nothing_asked_is_help_asked(call: Call) -> None:
    assert call() == call("--help")
    assert call().code == 0


def test_who_has_read_enough_is_told_nothing() -> None:
    command = [sys.executable, "-m", "rankup", "run", "--help"]
    with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None
        run.stdout.close()
        assert run.communicate()[1] == b""


def test_a_rank_that_is_capped_is_said_once_for_all_seeds(tmp_path: Path) -> None:
    command = ("run", "--rank", "300,1", "--width", 16, "--tasks", 1, "--epochs", 2, "--seeds", 2)
    done = rankup(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = "rankup: one task cannot add more rank than a layer's weight has: capped in hidden.0, "
    assert done.stderr.count(said) == 1, done.stderr


def test_seeds_that_failed_are_counted_and_what_is_left_is_named(tmp_path: Path) -> None:
    folders = {seed: tmp_path / f"seed-{seed}" for seed in range(3)}
    again = "a new run with other settings needs another --out"
    assert _failed({1: "task 'a' diverged"}, folders) == f"seed 1: task 'a' diverged; {again}"
    (folders[1] / "net").mkdir(parents=True)
    assert _failed({1: "no", 2: "neither"}, folders) == (
        f"seed 1: no (and 1 more seed failed); what was learned before is intact in "
        f"{folders[1] / 'net'}; {again}"
    )
    assert " (and 2 more seeds failed); " in _failed(dict.fromkeys(range(3), "no"), folders)
    assert _failed({0: "no"}, {0: tmp_path / "run"}) == f"no; {again}"


def _soon_nobody_is_in(group: int) -> bool:
    for _ in range(200):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """Processes started in the background ignore it, and so do those that they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize("stop", ["Ctrl-C", "kill"])
@pytest.mark.parametrize(("seeds", "first"), [(1, "p-digits-rank-0"), (2, "p-digits-rank/seed-0")])
def test_what_is_stopped_leaves_a_run_that_goes_on(
    seeds: int, first: str, stop: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "rankup", "run", "--tasks", "2", "--epochs", "200"]
    process = subprocess.Popen(
        [*command, "--seeds", str(seeds)],
        env=ENV,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    checkpoint = tmp_path / "runs" / first / "checkpoint.safetensors"
    while not checkpoint.exists():
        assert process.poll() is None
        time.sleep(0.05)
    if stop == "kill":
        process.terminate()
    else:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = process.communicate()
    assert process.returncode == 130
    assert errors.count("stopped") == 1
    assert "run the same command with --resume to continue" in errors
    assert "Traceback" not in errors
    assert checkpoint.exists()
    assert _soon_nobody_is_in(process.pid)


def test_several_seeds_are_told_as_mean_and_deviation(tmp_path: Path) -> None:
    command = ("run", "--seeds", 2, "--seed", 3, *QUICK, "--width", 16)
    done = rankup(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"mean of 2 +\d+\.\d\d ± \d+\.\d\d +0\.00 ± 0\.00", done.stdout), done.stdout
    assert max(map(len, done.stdout.splitlines()[:-1])) <= 80
    root = tmp_path / "runs" / "p-digits-rank"
    assert {p.name for p in root.iterdir()} >= {"seed-3", "seed-4", "report.html", "average.png"}
    assert "mean of 2 seeds" in (root / "report.html").read_text()
    assert (root / "seed-4" / "net" / "manifest.json").exists()
    refused = rankup(*command, cwd=tmp_path)
    assert refused.returncode == 1
    assert "already holds a run" in refused.stderr
    again = rankup(*command, "--resume", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    inside = rankup(*command, "--out", root / "seed-3", cwd=tmp_path)
    assert inside.returncode == 1
    assert "already holds a run of one seed" in inside.stderr
    assert not (root / "seed-3" / "seed-3").exists()


def test_a_path_that_looks_like_markup_is_a_path(tmp_path: Path) -> None:
    done = rankup("run", "--tasks", 1, "--epochs", 3, "--out", "a[/b][red]", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "A page with plots: a[/b][red]/report.html" in done.stdout


def test_a_run_goes_on_with_as_many_threads_as_it_had(tmp_path: Path) -> None:
    command = ("run", "--tasks", 1, "--epochs", 3, "--out", "run")
    assert rankup(*command, cwd=tmp_path, OMP_NUM_THREADS="2").returncode == 0
    again = rankup(*command, "--resume", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize(
    ("edited", "message"),
    [
        ({}, "it has no 'threads'"),
        ({"threads": None}, "its 'threads' is None, expected a whole number of at least 1"),
        ({"threads": "two"}, "its 'threads' is 'two', expected a whole number of at least 1"),
        ({"threads": 0}, "its 'threads' is 0, expected a whole number of at least 1"),
    ],
)
def test_a_run_whose_threads_are_not_known_does_not_go_on(
    edited: dict[str, object], message: str, folder: Path, tmp_path: Path, call: Call
) -> None:
    held = json.loads((folder / "runs" / "p-digits-rank-0" / "config.json").read_text())
    del held["threads"]
    config = tmp_path / "run" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(held | edited))
    again = call("run", "--resume", "--out", config.parent)
    assert again.code == 1
    assert f"{config} does not hold the settings of a run: {message}" in again.err


def test_only_who_asks_for_more_tasks_gets_them(tmp_path: Path) -> None:
    command = ("run", "--epochs", 2, "--out", "x")
    assert rankup(*command, "--tasks", 2, cwd=tmp_path).returncode == 0
    again = rankup(*command, "--resume", cwd=tmp_path)
    assert again.returncode == 0
    assert "more than before" not in again.stderr
    assert len((tmp_path / "x" / "metrics.jsonl").read_text().splitlines()) == 2
    more = rankup(*command, "--resume", "--tasks", 3, cwd=tmp_path)
    assert "x continues to 3 tasks, 1 more than before" in more.stderr
    assert len((tmp_path / "x" / "metrics.jsonl").read_text().splitlines()) == 3
    fewer = rankup(*command, "--resume", "--tasks", 2, cwd=tmp_path)
    assert "x is a run with tasks 3, not 2" in fewer.stderr


def test_seeds_that_join_others_learn_as_many_tasks(tmp_path: Path) -> None:
    command = ("run", "--epochs", 2, "--out", "x")
    assert rankup(*command, "--tasks", 2, "--seed", 1, "--seeds", 2, cwd=tmp_path).returncode == 0
    assert rankup(*command, "--seeds", 3, "--resume", cwd=tmp_path).returncode == 0
    for seed in range(3):
        assert len((tmp_path / f"x/seed-{seed}/metrics.jsonl").read_text().splitlines()) == 2
    grown = rankup(*command, "--resume", "--tasks", 3, "--seeds", 2, cwd=tmp_path)
    assert "x continues to 3 tasks, 1 more than before" in grown.stderr
    mixed = rankup(*command, "--resume", "--seeds", 3, cwd=tmp_path)
    assert "these runs were started with 2 to 3 tasks: say with --tasks" in " ".join(
        mixed.stderr.split()
    )


def test_what_a_terminal_cannot_show_ends_nothing(tmp_path: Path) -> None:
    plain = rankup("run", "-h", cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert plain.returncode == 0
    assert "Learn a stream task after task" in plain.stdout


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("run --stream p-", ["p-digits", "p-mnist"]),
        ("run --method pa", ["packnet", "parallel"]),
        ("compare --methods rank,er", ["rank,er-ring"]),
        ("paper res", ["resnet18"]),
    ],
)
def test_a_shell_completes_names(typed: str, offered: list[str], tmp_path: Path) -> None:
    words = f"rankup {typed}"
    asked = {"COMP_WORDS": words, "COMP_CWORD": f"{len(words.split()) - 1}"}
    done = rankup(cwd=tmp_path, _RANKUP_COMPLETE="complete_bash", **asked)
    assert done.stdout.split() == offered, done.stderr

"""`rankup run`: what it prints and writes, several seeds, and continuing."""

import json
import re
from pathlib import Path

import pytest
import torch

from helpers.calling import Call
from helpers.reports import constant, write_run
from rankup.cli.run import _failed
from rankup.runs.seal import seal_again

QUICK = ("run", "--tasks", 2, "--epochs", 1, "--width", 16)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def learned(run: str) -> int:
    return len(Path(run, "metrics.jsonl").read_text().splitlines())


def test_run_prints_its_table_and_writes_its_folder(call: Call) -> None:
    done = call(*QUICK)
    assert done.code == 0, done.err
    assert "permutation 02" in done.out
    assert re.search(r"average +\d+\.\d\d +\d+\.\d\d +0\.00", done.out)
    assert "A page with plots: runs/p-digits-rank-0/report.html" in done.out
    assert max(map(len, done.out.splitlines()[:-1])) <= 80
    names = {path.name for path in Path("runs/p-digits-rank-0").iterdir()}
    assert names >= {"config.json", "metrics.jsonl", "net", "report.html", "average.png"}
    assert call(*QUICK, "--resume").out == done.out


@pytest.mark.usefixtures("one_process")
def test_several_seeds_are_shown_as_mean_and_deviation(call: Call) -> None:
    command = (*QUICK, "--seeds", 2, "--seed", 3)
    done = call(*command)
    assert done.code == 0, done.err
    assert re.search(r"mean of 2 +\d+\.\d\d ± \d+\.\d\d +0\.00 ± 0\.00", done.out), done.out
    assert max(map(len, done.out.splitlines()[:-1])) <= 80
    root = Path("runs/p-digits-rank")
    assert {p.name for p in root.iterdir()} >= {"seed-3", "seed-4", "report.html", "average.png"}
    assert "mean of 2 seeds" in (root / "report.html").read_text()
    assert (root / "seed-4" / "net" / "manifest.json").exists()
    refused = call(*command)
    assert refused.code == 1
    assert "already holds a run" in refused.err
    inside = call(*command, "--out", root / "seed-3")
    assert inside.code == 1
    assert "already holds a run of one seed" in inside.err
    assert not (root / "seed-3" / "seed-3").exists()


@pytest.mark.usefixtures("no_plots")
def test_more_tasks_are_learned_only_if_asked_for(call: Call) -> None:
    command = ("run", "--epochs", 1, "--width", 16, "--out", "x")
    assert call(*command, "--tasks", 2).code == 0
    again = call(*command, "--resume")
    assert again.code == 0
    assert "more than before" not in again.err
    assert learned("x") == 2
    more = call(*command, "--resume", "--tasks", 3)
    assert "x continues to 3 tasks, 1 more than before" in more.err
    assert learned("x") == 3
    fewer = call(*command, "--resume", "--tasks", 2)
    assert "x is a run with tasks 3, not 2" in fewer.err


@pytest.mark.usefixtures("one_process", "no_plots")
def test_seeds_that_join_others_learn_as_many_tasks(call: Call) -> None:
    command = ("run", "--epochs", 3, "--width", 16, "--out", "x")
    assert call(*command, "--tasks", 2, "--seed", 1, "--seeds", 2).code == 0
    assert call(*command, "--seeds", 3, "--resume").code == 0
    assert [learned(f"x/seed-{seed}") for seed in range(3)] == [2, 2, 2]
    grown = call(*command, "--resume", "--tasks", 3, "--seeds", 2)
    assert "x continues to 3 tasks, 1 more than before" in grown.err
    mixed = call(*command, "--resume", "--seeds", 3)
    assert "these runs were started with 2 to 3 tasks: say with --tasks" in mixed.err


@pytest.mark.usefixtures("one_process", "no_plots")
def test_capped_rank_is_said_once_for_all_seeds(call: Call) -> None:
    with pytest.warns(UserWarning, match="more rank than a layer's weight has: capped in") as told:
        assert call(*QUICK, "--rank", "300,1", "--seeds", 2).code == 0
    assert len(told) == 1


@pytest.mark.usefixtures("no_plots")
def test_method_keeps_its_recipe_but_for_given_options(call: Call) -> None:
    assert call(*QUICK, "--method", "agem", "--lr", 0.2, "--out", "x").code == 0
    recipe = json.loads(Path("x/config.json").read_text())["recipe"]
    assert (recipe["optimiser"], recipe["schedule"], recipe["lr"]) == ("sgd", "constant", 0.2)


@pytest.mark.usefixtures("no_plots")
def test_path_that_looks_like_markup_is_a_path(call: Call) -> None:
    done = call(*QUICK, "--out", "a[/b][red]")
    assert "A page with plots: a[/b][red]/report.html" in done.out


@pytest.mark.usefixtures("no_plots")
def test_run_resumes_with_its_number_of_threads(call: Call) -> None:
    assert call(*QUICK, "--threads", 1, "--out", "x").code == 0
    torch.set_num_threads(2)
    assert call(*QUICK, "--resume", "--out", "x").code == 0
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("edited", "message"),
    [
        ({}, "it has no 'threads'"),
        ({"threads": "two"}, "its 'threads' is 'two', expected a whole number of at least 1"),
        ({"threads": 0}, "its 'threads' is 0, expected a whole number of at least 1"),
    ],
)
def test_run_with_unknown_threads_is_not_resumed(
    edited: dict[str, object], message: str, tmp_path: Path, call: Call
) -> None:
    config = write_run(tmp_path / "run", constant(1)) / "config.json"
    settings = json.loads(config.read_text())
    del settings["threads"]
    config.write_text(json.dumps(settings | edited))
    seal_again(config.parent)
    done = call("run", "--resume", "--out", config.parent)
    assert done.code == 1
    assert f"{config} does not hold the settings of a run: {message}" in done.err


def test_failed_seeds_are_counted_and_named(tmp_path: Path) -> None:
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

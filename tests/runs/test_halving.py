"""`rankup tune --search asha`: the best trial is found, for no more than the budget."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.calling import Call
from rankup.errors import RankupError
from rankup.methods.search import Search
from rankup.runs import tune
from rankup.runs.folder import write_config, write_lines
from rankup.runs.launch import Launch
from rankup.runs.records import read_lines
from rankup.runs.request import Device, Request
from rankup.runs.seed_run import SeedRun
from rankup.runs.tune import Outcome, Tuning

pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'rankup[ray]'")

TASKS, EPOCHS, COUNT = 10, 4, 12
WHOLE = TASKS * EPOCHS
REQUEST = Request(
    tasks=TASKS,
    width=8,
    seed=1000,
    device=Device.cpu,
    threads=1,
    recipe_options={"epochs": EPOCHS},
    held_out=0.2,
)
TRIED = [{"lr": number / 100} for number in range(1, COUNT + 1)]

NO_COSTS = dict.fromkeys(("parameters", "buffer", "seconds"), 0)

Reaches = Callable[[float, int], float | None]  # by the rate and the task; None: it fails


class Rigged:
    """Stands for training: a trial reaches what it is told, and the tasks learned are counted."""

    def __init__(self, reaches: Reaches) -> None:
        self.reaches, self.learned = reaches, 0

    def __call__(self, runs: Sequence[SeedRun], **_: object) -> dict[SeedRun, str]:
        failures: dict[SeedRun, str] = {}
        for run in runs:
            if not run.folder.exists():
                write_config(run.config, run.folder)
            lines = read_lines(run.folder)
            while len(lines) < (run.until or TASKS) and run not in failures:
                self.learned += 1
                accuracy = self.reaches(run.config.recipe["lr"], len(lines))
                if accuracy is None:
                    failures[run] = "it is rigged"
                else:
                    row = [accuracy] * (len(lines) + 1)
                    lines.append({"task": f"{len(lines)}", "accuracy": row} | NO_COSTS)
            write_lines(run.folder, lines)
        return failures


def search(
    root: Path,
    reaches: Reaches,
    monkeypatch: pytest.MonkeyPatch,
    *,
    budget: int | None = None,
    request: Request = REQUEST,
) -> tuple[Outcome, Rigged]:
    rigged = Rigged(reaches)
    monkeypatch.setattr(tune, "run_seeds", rigged)
    tuning = Tuning(Launch(request), {"rank": TRIED}, root, Search.asha, budget)
    return tuning.run("rank", None, pytest.fail), rigged


@pytest.mark.parametrize("best", [1, 5, 12])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_best_is_found_for_half_of_a_grid(
    best: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = replace(REQUEST, seed=1000 + seed)
    found, rigged = search(
        tmp_path, lambda lr, _: 0.9 - abs(lr - best / 100), monkeypatch, request=request
    )
    assert found.chosen == {"lr": best / 100}
    assert len(found.trials) == COUNT
    assert rigged.learned * EPOCHS <= found.budget == COUNT * WHOLE // 2
    stopped = [trial.stopped for trial in found.trials if trial.stopped]
    assert {*stopped} == {4}  # 48 of 60 tasks are for this; two trials learn the six that are left
    assert len(stopped) >= COUNT - 2


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_is_worst_in_the_first_task_can_be_found(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a method's strength, which only matters once there is something to forget."""
    found, _ = search(
        tmp_path,
        lambda lr, task: 0.5 + 3 * lr if task else 0.9 - lr,
        monkeypatch,
        request=replace(REQUEST, seed=1000 + seed),
    )
    assert found.chosen == {"lr": COUNT / 100}


def test_smaller_budget_begins_fewer_and_still_ends_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for budget in (WHOLE, WHOLE + 3 * EPOCHS, 2 * WHOLE):
        found, rigged = search(
            tmp_path / str(budget), lambda lr, _: 0.5 + lr, monkeypatch, budget=budget
        )
        assert rigged.learned * EPOCHS <= budget
        begun = [trial.settings["lr"] for trial in found.trials]
        assert len(begun) == min(COUNT, (budget - WHOLE) // EPOCHS + 1)
        assert found.trials[begun.index(max(begun))].stopped is None
    with pytest.raises(RankupError, match="39 epochs is too small: one trial of rank takes 40"):
        search(tmp_path / "none", lambda lr, _: lr, monkeypatch, budget=WHOLE - 1)


def test_where_the_best_fail_later_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """High rates are best at first, and fail in the second task."""
    found, rigged = search(
        tmp_path, lambda lr, task: None if task and lr > 0.03 else 0.5 + lr, monkeypatch
    )
    assert found.chosen == {"lr": 0.03}
    assert rigged.learned * EPOCHS <= found.budget
    assert [trial.failed for trial in found.trials if trial.failed]


def test_resuming_learns_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, rigged = search(tmp_path, lambda lr, _: 0.5 + lr, monkeypatch)
    again, more = search(
        tmp_path, lambda *_: None, monkeypatch, request=replace(REQUEST, resume=True)
    )
    assert again == first
    assert (rigged.learned > 0, more.learned) == (True, 0)


@pytest.mark.usefixtures("one_process")
def test_command_learns_and_chooses(tmp_path: Path, call: Call) -> None:
    short = ("--stream", "s-digits", "--epochs", 2, "--width", 16, "--device", "cpu")
    asked = ("--methods", "finetune,multitask", "--try", "lr=0.005,0.02,0.01")
    done = call("tune", *short, *asked, "--search", "asha", "--out", tmp_path)
    assert done.code == 0, done.err
    one, all_at_once = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("finetune", "multitask")
    )
    (best,) = (trial for trial in one["trials"] if trial["stopped"] is None)
    assert one["chosen"] == best["settings"]
    assert (one["search"], one["budget"]) == ("asha", 3 * 5 * 2 // 2)
    learned = [len(read_lines(run)) for run in tmp_path.glob("finetune/*/*")]
    assert sorted(learned) == sorted(trial["stopped"] or 5 for trial in one["trials"])
    assert sum(learned) * 2 <= one["budget"]
    # One that learns all tasks at once cannot be stopped: the budget is for one trial of it.
    assert [trial["stopped"] for trial in all_at_once["trials"]] == [None]


def test_what_cannot_be_is_one_sentence(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = call("tune", "--methods", "rank", "--budget", 9, "--out", tmp_path / "run")
    assert (done.code, done.err) == (
        1,
        "rankup: --budget is for --search asha: in a grid every trial learns all tasks\n",
    )
    monkeypatch.setitem(sys.modules, "optuna", None)
    missing = call("tune", "--search", "asha", "--out", tmp_path / "run")
    assert missing.code == 1
    assert missing.err == "rankup: --search asha needs Optuna: pip install 'rankup[ray]'\n"
    assert not (tmp_path / "run").exists()

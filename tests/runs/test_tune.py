"""Settings are chosen by trials, on data and seeds that no report uses."""

import json
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import rankup
from helpers.calling import Call
from rankup.cli import tune as tune_command
from rankup.cli.main import app
from rankup.data.heldout import hold_out
from rankup.data.streams import Stream, make_stream
from rankup.methods import METHODS, method_options
from rankup.methods.search import TRIALS, trials
from rankup.methods.settings import ALIKE, TUNED, settings_for
from rankup.runs import launch as launching
from rankup.runs import tune
from rankup.runs.folder import RunError, check_folder
from rankup.runs.launch import Launch
from rankup.runs.many_seeds import run_seeds
from rankup.runs.records import read_lines
from rankup.runs.request import Device, Request
from rankup.runs.seed_run import SeedRun
from rankup.runs.tune import Tuning
from rankup.training.recipe import Recipe, recipe_for

RECIPE_FIELDS = {item.name for item in fields(Recipe)}
TRIED = [{"lr": 1e-4}, {"lr": 2e-2}, {"lr": 1e9}]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Runs set the number of threads, which must not affect the tests after them."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


REQUEST = Request(
    tasks=2,
    width=16,
    seed=1000,
    device=Device.cpu,
    threads=1,
    recipe_options={"epochs": 8},
    held_out=0.2,
)


def one_by_one(runs: Any, *, on_progress: Any, note: Any, pool: None) -> dict[SeedRun, str]:
    failures: dict[SeedRun, str] = {}
    for run in runs:
        failures |= run_seeds([run], on_progress=on_progress, note=note)
    return failures


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials run in this process, because starting others takes longer than all of them."""
    monkeypatch.setattr(tune, "run_seeds", one_by_one)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trials that have ended, only to be read."""
    root = tmp_path_factory.mktemp("tuned")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tune, "run_seeds", one_by_one)
        outcome(REQUEST, root)
    return root


def outcome(request: Request, root: Path) -> dict[str, Any]:
    Tuning(Launch(request), {"rank": TRIED}, root).run("rank", None, pytest.fail)
    found: dict[str, Any] = json.loads((root / "rank.json").read_text())
    return found


def test_every_method_gets_as_many_trials() -> None:
    for method in METHODS:
        tried = trials(method)
        assert len(tried) == len({json.dumps(each) for each in tried}) == TRIALS
        for each in tried:
            Recipe(**{name: value for name, value in each.items() if name in RECIPE_FIELDS})
            method_options(method, {n: v for n, v in each.items() if n not in RECIPE_FIELDS})


def test_best_trial_is_chosen_and_all_are_kept(tuned: Path, tmp_path: Path) -> None:
    found = json.loads((tuned / "rank.json").read_text())
    low, good, wild = found["trials"]
    assert found["chosen"] == {"lr": 2e-2}
    assert [each["settings"] for each in found["trials"]] == TRIED
    assert "not learned" in low["failed"] or low["accuracy"] < good["accuracy"]
    assert good["accuracy"][0] > 0.5
    assert wild["failed"] is not None
    assert found["seeds"] == [1000]
    assert (found["width"], found["rank"], found["seeded"]) == (16, "11,1", None)
    assert (found["epochs"], found["batch"]) == (8, 64)
    # Another command takes its settings from there, and overrides them with what it is given.
    asked = Request(recipe=str(tuned), tasks=2, device=Device.cpu)
    (run,) = Launch(asked).of("rank", {}, {0: tmp_path / "run"})
    assert (run.config.recipe["lr"], run.config.recipe["epochs"]) == (2e-2, 8)
    given = {"lr": 0.5, "epochs": 3}
    (other,) = Launch(replace(asked, recipe_options=given)).of("rank", {}, {0: tmp_path})
    assert (other.config.recipe["lr"], other.config.recipe["epochs"]) == (0.5, 3)


def test_first_tasks_are_those_of_the_whole_stream(tmp_path: Path) -> None:
    asked = replace(REQUEST, stream="s-digits", tasks=None, first=2)
    found = outcome(asked, tmp_path)
    assert (found["tasks"], found["tasks_in_stream"]) == (2, 5)
    (seed,) = Launch(asked).of("rank", {}, {1000: tmp_path / "rank/trial-02/seed-1000"})
    assert len(read_lines(seed.out)) == 2
    # Another process, which makes its stream itself, gets the same one.
    whole = hold_out(make_stream("s-digits", seed=1000), 0.2, seed=1000)
    made = replace(seed, preloaded=None).stream
    assert len(made) == 2
    for task, expected in zip(made, whole, strict=False):
        assert task.name == expected.name
        assert torch.equal(task.train_x, expected.train_x)
        assert torch.equal(task.test_y, expected.test_y)
    # With all tasks these are other trials, which cannot go on in the same folder.
    others = replace(seed.config, tasks_in_stream=None, tasks=5)
    with pytest.raises(RunError, match="tasks 2, not 5"):
        check_folder(others, seed.out, resume=True)


def test_too_many_first_tasks_are_refused(call: Call, tmp_path: Path) -> None:
    done = call(
        "tune", "--methods", "rank", "--stream", "s-digits", "--first", 7, "--out", tmp_path
    )
    assert done.code == 1
    assert "the first 7 tasks were asked for, but s-digits has 5" in " ".join(done.err.split())
    assert not any(tmp_path.iterdir())


def test_batch_of_the_trials_goes_with_the_choice(tmp_path: Path) -> None:
    (tmp_path / "rank.json").write_text('{"epochs": 8, "batch": 32, "chosen": {"lr": 0.5}}')
    asked = Request(recipe=str(tmp_path), tasks=2, device=Device.cpu)
    (seed,) = Launch(asked).of("rank", {}, {0: tmp_path / "run"})
    assert seed.config.recipe["batch"] == 32


def test_trials_have_the_recipe_of_later_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even though they learn from fewer samples, as some are held out."""
    samples = len(make_stream("p-digits", tasks=1)[0].train_y)
    seen: list[int] = []

    def noted(*args: Any, samples: int, **kwargs: Any) -> Recipe:
        seen.append(samples)
        return recipe_for(*args, samples=samples, **kwargs)

    monkeypatch.setattr("rankup.runs.launch.recipe_for", noted)
    for asked in (REQUEST, replace(REQUEST, held_out=0.0)):
        Launch(asked).of("rank", {}, {1000: tmp_path})
    assert seen == [samples, samples]


def test_given_settings_go_with_the_chosen(tmp_path: Path) -> None:
    given = {"epochs": 8, "pixels": "centred"}
    found = outcome(replace(REQUEST, recipe_options=given), tmp_path / "tune")
    assert found["given"] == given
    asked = Request(recipe=str(tmp_path / "tune"), tasks=2, device=Device.cpu)
    (seed,) = Launch(asked).of("rank", {}, {0: tmp_path / "run"})
    chosen = {name: seed.config.recipe[name] for name in ("lr", "pixels", "epochs")}
    assert chosen == {"lr": 2e-2, "pixels": "centred", "epochs": 8}


def test_trials_at_once_have_a_thread_each(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    asked = replace(REQUEST, threads=None)
    tune = Tuning(Launch(asked, at_once=3), {"rank": TRIED}, tmp_path)
    assert [seed.config.threads for seed in tune._all("rank")] == [1, 1, 1]
    # Their processes make their streams themselves.
    assert all(seed.preloaded is None for seed in tune._all("rank"))


def test_test_data_is_not_looked_at(
    tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = json.loads((tuned / "rank.json").read_text())["trials"]

    def spoiled(*args: Any, **options: Any) -> Stream:
        made = make_stream(*args, **options)
        tasks = (replace(t, test_x=torch.zeros_like(t.test_x)) for t in made)
        return Stream(made.name, tuple(tasks))

    monkeypatch.setattr(launching, "make_stream", spoiled)
    assert outcome(REQUEST, tmp_path / "spoiled")["trials"] == before


def test_resuming_runs_nothing_twice(tuned: Path) -> None:
    first = json.loads((tuned / "rank.json").read_text())
    with pytest.raises(rankup.RankupError, match="already holds a run: add --resume"):
        Tuning(Launch(REQUEST), {"rank": TRIED}, tuned)
    metrics = tuned / "rank" / "trial-02" / "seed-1000" / "metrics.jsonl"
    written = metrics.stat().st_mtime_ns
    assert outcome(replace(REQUEST, resume=True), tuned)["trials"] == first["trials"]
    assert metrics.stat().st_mtime_ns == written


def test_fewer_trials_do_not_replace_a_choice(tuned: Path) -> None:
    before = (tuned / "rank.json").read_bytes()
    again = Launch(replace(REQUEST, resume=True))
    with pytest.raises(rankup.RankupError, match="rank was started with 3 trials, not 2: continue"):
        Tuning(again, {"rank": TRIED[:2]}, tuned)
    assert (tuned / "rank.json").read_bytes() == before
    Tuning(again, {"rank": [*TRIED, {"lr": 3e-2}]}, tuned)  # more trials are allowed


def test_epochs_are_those_of_the_best_trial(tmp_path: Path) -> None:
    asked = Launch(replace(REQUEST, recipe_options={}))
    tried = [{"epochs": 1, "batch": 128}, {"epochs": 8, "batch": 32}]
    found = Tuning(asked, {"rank": tried}, tmp_path).run("rank", None, pytest.fail)
    assert found.chosen == {"epochs": 8, "batch": 32}
    assert (found.epochs, found.batch) == (8, 32)


def test_failed_method_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = {"finetune": [{"lr": 1e9}], "rank": [{"lr": 2e-2}]}
    monkeypatch.setattr(tune_command, "trials", lambda method, _: tried[method])
    words = f"tune --methods finetune,rank --tasks 2 --width 16 --epochs 8 --out {tmp_path}"
    answer = CliRunner().invoke(app, [*words.split(), "--device", "cpu"])
    assert isinstance(answer.exception, rankup.RankupError)
    expected = f"1 of 2 methods failed: finetune; what the others chose is in {tmp_path}"
    assert str(answer.exception) == expected
    # Seeds that no other command uses unless told.
    assert json.loads((tmp_path / "rank.json").read_text())["seeds"] == [1000]
    assert "all 1 trials of finetune failed" in answer.output
    assert not (tmp_path / "finetune.json").exists()
    assert json.loads((tmp_path / "rank.json").read_text())["chosen"] == {"lr": 2e-2}


def test_what_trials_vary_cannot_be_given(tmp_path: Path) -> None:
    given = replace(REQUEST, recipe_options={"lr": 1e-3})
    with pytest.raises(rankup.RankupError, match="lr was given, but it is what trials of rank"):
        Tuning(Launch(given), {"rank": TRIED}, tmp_path)


def test_folder_of_settings_is_checked(tmp_path: Path) -> None:
    with pytest.raises(rankup.RankupError, match="there is no recipe 'nothing'"):
        Request(recipe="nothing")
    (tmp_path / "rank.json").write_text('{"chosen": {"lr": -1}}')
    with pytest.raises(rankup.RankupError, match="lr must be positive"):
        settings_for("rank", "p-digits", "mlp", str(tmp_path))
    (tmp_path / "rank.json").write_text("[]")
    with pytest.raises(rankup.RankupError, match="is not a settings file"):
        settings_for("rank", "p-digits", "mlp", str(tmp_path))
    with pytest.warns(UserWarning, match="has no settings for finetune, so its defaults are used"):
        assert settings_for("finetune", "p-digits", "mlp", str(tmp_path)).recipe == {}
    (tmp_path / "rank.json").unlink()
    with pytest.raises(rankup.RankupError, match="or a folder written by `rankup tune`"):
        Request(recipe=str(tmp_path))


def test_values_to_try_may_be_chosen(tmp_path: Path) -> None:
    words = f"tune --methods rank --tasks 2 --width 16 --epochs 8 --out {tmp_path} --device cpu"
    tried = ["--try", "lr=0.0001,0.02", "--try", "reuse=no"]
    answer = CliRunner().invoke(app, [*words.split(), *tried])
    assert answer.exit_code == 0, answer.output
    found = json.loads((tmp_path / "rank.json").read_text())
    both = [{"lr": 1e-4, "reuse": False}, {"lr": 0.02, "reuse": False}]
    assert [each["settings"] for each in found["trials"]] == both
    assert found["chosen"] == {"lr": 0.02}  # all trials were without reuse: that was no choice
    assert f"--recipe {tmp_path} --no-reuse" in " ".join(answer.output.split())


def test_reason_of_a_failed_trial_is_said(call: Call, tmp_path: Path) -> None:
    words = ("tune", "--methods", "rank", "--tasks", 2, "--width", 16, "--epochs", 8)
    done = call(*words, "--try", "lr=0.02,1e9", "--out", tmp_path, "--device", "cpu")
    assert done.code == 0, done.err
    said = " ".join(done.err.split())
    assert "rankup: lr 1e+09 failed: task 'permutation 01' diverged: the loss of" in said


@pytest.mark.parametrize(
    ("share", "why"), [(0.5, "every training label is"), (0.9, "its training inputs are")]
)
def test_holding_out_too_much_is_refused(share: float, why: str) -> None:
    x, y = torch.rand(2, 3), torch.tensor([0, 1])
    stream = Stream("two", (rankup.Task("a", 2, x, y, x, y),))
    message = f"holding out {share:.0%} of the 2 training samples of task 'a' leaves too few"
    with pytest.raises(rankup.RankupError, match=f"{message} to learn from: .*{why}"):
        hold_out(stream, share, seed=0)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("lr", "values to try must be given as NAME=A,B,…, got 'lr'"),
        ("strength=1", "'strength' is not a setting of rank, which has epochs, "),
        ("lr=fast", "lr must be a number, got 'fast'"),
        ("epochs=1.5", "epochs must be a whole number, got '1.5'"),
        ("reuse=perhaps", "reuse must be yes or no, got 'perhaps'"),
        ("lr=0.1,-1", "lr must be positive, got -1.0"),
        ("last=-1", "last must be at least 0, got -1"),
        ("lr=0.1,1e-1", "lr must be tried with each value once, got 'lr=0.1,1e-1'"),
        ("lr=0.1 lr=0.2", "the values to try for lr must be given once, as lr=A,B,…"),
    ],
)
def test_bad_value_to_try_is_refused(given: str, why: str) -> None:
    with pytest.raises(rankup.RankupError, match=re.escape(why)):
        trials("rank", given.split())


def test_untuned_stream_has_settings_of_a_similar_one() -> None:
    for case, alike in ALIKE.items():
        assert not (TUNED / case).exists()
        assert (TUNED / alike).is_dir()
    own = settings_for("packnet", "s-miniimagenet", "resnet18")
    assert own == settings_for("packnet", "s-cifar100", "resnet18")
    assert own.options["retrain"] == 1 / 3


def test_variants_of_a_method_have_own_settings(tmp_path: Path) -> None:
    words = f"tune --methods rank --tasks 2 --width 16 --epochs 8 --device cpu --out {tmp_path}"
    tried = ["--rank", "0,0", "--seeded", "64", "--try", "lr=0.03"]
    answer = CliRunner().invoke(app, [*words.split(), *tried])
    assert answer.exit_code == 0, answer.output
    assert json.loads((tmp_path / "rank-seeded.json").read_text())["chosen"] == {"lr": 0.03}
    (tmp_path / "rank.json").write_text('{"chosen": {"lr": 0.5}}')
    (tmp_path / "parallel.json").write_text('{"chosen": {"lr": 0.5}}')
    (tmp_path / "parallel-rank-2.json").write_text('{"chosen": {"lr": 0.25, "size": "2"}}')
    asked = Request(recipe=str(tmp_path), tasks=2, device=Device.cpu)

    def rate(method: str, rank: str = "11,1", **given: str) -> float:
        seeded = "64" if rank == "0,0" else None
        launch = Launch(replace(asked, rank=rank, seeded=seeded))
        (seed,) = launch.of(method, given, {0: tmp_path / "run"})
        return float(seed.config.recipe["lr"])

    assert rate("rank") == 0.5
    assert rate("rank", "0,0") == 0.03
    assert rate("parallel") == rate("parallel", size="4") == 0.5
    assert rate("parallel", size="2") == 0.25
    # Nothing was tuned for it: settings for learned factors are no substitute.
    (tmp_path / "rank-seeded.json").unlink()
    with pytest.warns(UserWarning, match="has no settings for rank-seeded"):
        assert rate("rank", "0,0") == 0.02


def test_folder_of_runs_is_refused_for_trials(tmp_path: Path) -> None:
    for file in ("config.json", "seed-0/config.json", "compare.json"):
        root = tmp_path / file.replace("/", "-")
        (root / file).parent.mkdir(parents=True)
        (root / file).write_text("{}")
        with pytest.raises(rankup.RankupError, match="holds runs of another command"):
            Tuning(Launch(REQUEST), {"rank": [{"lr": 0.1}]}, root)

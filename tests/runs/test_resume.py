"""Resuming a run does not require repeating its options."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rankup
from helpers.calling import Call
from helpers.damage import edit_config
from helpers.pictures import encoded, pictures
from rankup.errors import RankupError
from rankup.runs import many_seeds
from rankup.runs.checkpoints import CHECKPOINT
from rankup.runs.records import as_begun
from rankup.runs.request import Request
from rankup.runs.run import run_together
from rankup.runs.seal import seal_again
from rankup.runs.seed_run import OnProgress, SeedRun

SHORT = {"epochs": 2, "batch": 64}

pytestmark = pytest.mark.usefixtures("no_plots")


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds learn in this process, because starting others takes longer than all of them."""

    def together(runs: list[SeedRun], on_progress: OnProgress, _: None) -> dict[SeedRun, str]:
        failures = run_together(runs, on_progress=on_progress)
        return {run: str(why) for run, why in failures.items()}

    monkeypatch.setattr(many_seeds, "_in_processes", together)


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no page, which takes longer than learning."""
    monkeypatch.setattr("rankup.cli.run.show_runs", lambda *_: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run `alone`, and one of two seeds, `both`, only to be read."""
    folder = tmp_path_factory.mktemp("begun")
    supsup = {"share": 0.4, "width": 16, "seed": 3, "out": folder / "alone"}
    rankup.run("supsup", "s-digits", **supsup, **SHORT)
    for seed in (1, 2):
        out = folder / "both" / f"seed-{seed}"
        rankup.run(tasks=2, seed=seed, threads=1, out=out, **SHORT)
    return folder


def held(folder: Path) -> dict[str, str]:
    files = (folder / name for name in ("config.json", "metrics.jsonl"))
    return {path.name: path.read_text() for path in files}


def test_folder_is_enough_to_resume(folder: Path, call: Call) -> None:
    before = held(folder / "alone")
    left = [folder / "alone" / name for name in (CHECKPOINT, ".report.html.tmp")]  # by a kill
    for path in left:
        path.touch()
    again = call("run", "--resume", "--out", folder / "alone")
    assert again.code == 0, again.err
    assert not any(path.exists() for path in left)
    assert held(folder / "alone") == before
    assert "split 05" in again.out


@pytest.mark.usefixtures("no_page")
def test_all_seeds_learn_more_tasks(folder: Path, call: Call, tmp_path: Path) -> None:
    both = tmp_path / "both"
    shutil.copytree(folder / "both", both)
    more = call("run", "--resume", "--out", both, "--tasks", 3)
    assert "both continues to 3 tasks, 1 more than before" in more.err
    for seed in (1, 2):
        config = json.loads(held(both / f"seed-{seed}")["config.json"])
        assert (config["tasks"], config["seed"], config["recipe"]["batch"]) == (3, seed, 64)
    assert not (both / "seed-0").exists()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (("--epochs", 3), "with epochs 2, not 3"),
        (("--method", "ewc"), "with method supsup, not ewc"),
        (("--share", 0.5), "with share 0.4, not 0.5"),
        (("--width", 32), "with width 16, not 32"),
        (("--seed", 4), "with seed 3, not 4"),
        (("--recipe", "paper"), "with recipe default, not paper"),
    ],
)
def test_differing_option_is_refused(
    said: tuple[object, ...], words: str, folder: Path, call: Call
) -> None:
    before = held(folder / "alone")
    again = call("run", "--resume", "--out", folder / "alone", *said)
    assert again.code == 1
    assert f"alone was started {words}" in again.err
    assert held(folder / "alone") == before


def nothing_said(option: str) -> bool:
    return False


@pytest.fixture
def stored(folder: Path, tmp_path: Path) -> Iterator[Any]:
    """Writes the settings of a run with some of them edited."""
    config = json.loads(held(folder / "alone")["config.json"])

    def write(name: str, **edited: Any) -> Path:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        edit_config(tmp_path / name, **edited)
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("edited", "words"),
    [
        ({"net": "mlpp"}, "its 'net' is 'mlpp', expected one of mlp, resnet18"),
        ({"width": "16"}, "its 'width' is '16'"),
        ({"width": True}, "its 'width' is True"),
        ({"recipe": None}, "its 'recipe' is None"),
    ],
)
def test_damaged_settings_are_refused(edited: dict[str, Any], words: str, stored: Any) -> None:
    root = stored("run", **edited) / "run"
    with pytest.raises(RankupError, match=f"does not hold the settings of a run: {words}"):
        as_begun("rank", {}, Request(), root, nothing_said)


def test_seeds_with_gaps_are_not_guessed(stored: Any) -> None:
    stored("seed-2", seed=2)
    root = stored("seed-5", seed=5)
    with pytest.raises(RankupError, match="holds seeds 2, 5: say with --seed and --seeds which"):
        as_begun("rank", {}, Request(), root, nothing_said)
    method, _, request = as_begun("rank", {}, Request(seed=5), root, lambda name: name == "seed")
    assert (request.seed, request.seeds, method) == (5, 1, "supsup")


def test_empty_folder_changes_nothing(tmp_path: Path) -> None:
    asked = "rank", {}, Request()
    assert as_begun(*asked, tmp_path / "none", nothing_said) == asked


def test_seeds_that_had_not_begun_resume_too(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **others: object) -> None:
        raise RankupError("stopped")

    out = tmp_path / "three"
    with monkeypatch.context() as patched:
        patched.setattr("rankup.runs.many_seeds.run_seeds", stop)
        short = ("--tasks", 2, "--epochs", 2, "--width", 16)
        assert "stopped" in call("run", *short, "--seeds", 3, "--out", out).err
    assert "nothing has been learned yet in" in call("report", out).err
    again = call("run", "--resume", "--out", out)
    assert again.code == 0, again.err
    assert all(held(out / f"seed-{seed}")["metrics.jsonl"].count("\n") == 2 for seed in range(3))
    (out / "seed-1" / "metrics.jsonl").unlink()
    assert "lacks tasks that net/ has (it lists 0 of 2)" in call("report", out).err
    shutil.rmtree(out / "seed-1" / "net")
    shown = call("report", out)
    assert (shown.code, shown.err) == (0, "rankup: seed-1: nothing has been learned yet\n")


@pytest.mark.parametrize(("command", "what"), [("run", "run"), ("compare", "comparison")])
def test_resuming_nothing_is_refused(command: str, what: str, call: Call, tmp_path: Path) -> None:
    out = tmp_path / "nowhere"
    done = call(command, "--resume", "--out", out, "--threads", 1)
    assert (done.code, done.err) == (1, f"rankup: there is no {what} in {out} to continue\n")
    assert not out.exists()


@pytest.mark.usefixtures("no_page")
def test_resume_with_options_may_begin(call: Call, tmp_path: Path) -> None:
    short = ("--tasks", 1, "--epochs", 1, "--width", 16, "--lr", 0.05)
    assert call("run", *short, "--resume", "--out", tmp_path / "new").code == 0


@pytest.mark.usefixtures("no_page")
def test_recipe_folder_may_be_gone(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tuned").mkdir()
    chosen = {"method": "rank", "epochs": 2, "given": {}, "chosen": {"lr": 0.05}}
    Path("tuned/rank.json").write_text(json.dumps(chosen))
    done = call("run", "--recipe", "tuned", "--tasks", 1, "--width", 16, "--out", "r")
    assert done.code == 0, done.err
    before = held(Path("r"))
    Path("tuned").rename("elsewhere")
    again = call("run", "--resume", "--out", "r")
    assert again.code == 0, again.err
    assert held(Path("r")) == before
    more = call("run", "--resume", "--out", "r", "--tasks", 2)
    assert more.code == 0, more.err
    recipe = json.loads(held(Path("r"))["config.json"])["recipe"]
    assert (recipe["name"], recipe["lr"], recipe["epochs"]) == ("tuned", 0.05, 2)


def test_number_of_threads_stays(folder: Path, call: Call) -> None:
    before = json.loads(held(folder / "alone")["config.json"])["threads"]
    assert call("run", "--resume", "--out", folder / "alone", "--threads", before).code == 0
    other = call("run", "--resume", "--out", folder / "alone", "--threads", before + 1)
    assert other.code == 1
    assert f"was started with threads {before}, not {before + 1}, on which exact" in other.err


def test_other_torch_is_said_and_recorded(call: Call, tmp_path: Path) -> None:
    out = tmp_path / "r"
    assert call("run", "--tasks", 1, "--epochs", 2, "--width", 16, "--out", out).code == 0
    config = json.loads(held(out)["config.json"])
    edit_config(out, versions={**config["versions"], "torch": "1.0"})
    before = held(out)
    assert call("run", "--resume", "--out", out).err == ""  # nothing was left to learn
    assert held(out) == before
    more = call("run", "--resume", "--out", out, "--tasks", 2)
    now = torch.__version__
    assert more.code == 0, more.err
    said = f"rankup: {out} was started with torch 1.0 and continues with {now}: its bits may"
    assert more.err.count(said) == 1
    assert json.loads(held(out)["config.json"])["versions"]["torch"] == ["1.0", now]
    assert f"1.0, {now}" in (out / "report.html").read_text()
    again = call("run", "--resume", "--out", out, "--tasks", 3)
    assert (again.code, "started with torch" in again.err) == (0, False)
    assert json.loads(held(out)["config.json"])["versions"]["torch"] == ["1.0", now]


@pytest.mark.usefixtures("no_page")
def test_other_torch_of_seeds_is_said_once(call: Call, tmp_path: Path) -> None:
    out = tmp_path / "both"
    short = ("--method", "finetune", "--tasks", 2, "--epochs", 2, "--width", 16)
    assert call("run", *short, "--seeds", 2, "--out", out).code == 0
    for path in out.glob("seed-*/config.json"):
        edit_config(path.parent, versions={"torch": "1.0"})
        lines = path.with_name("metrics.jsonl")
        lines.write_text(lines.read_text().splitlines(keepends=True)[0])
    again = call("run", "--resume", "--out", out)
    assert again.code == 0, again.err
    said = [line for line in again.err.splitlines() if "started with torch" in line]
    assert len(said) == 1
    assert said[0].startswith(f"rankup: {out / 'seed-0'} (and 1 more) was started with torch 1.0")
    for seed in (0, 1):
        versions = json.loads(held(out / f"seed-{seed}")["config.json"])["versions"]
        assert versions == {"torch": ["1.0", torch.__version__]}


@pytest.mark.usefixtures("no_page")
def test_changed_images_are_refused(call: Call, tmp_path: Path) -> None:
    for number, name in enumerate("abcd"):
        (tmp_path / "mine" / name).mkdir(parents=True)
        for index, image in enumerate(pictures(12, 6, 6, seed=number)):
            content = encoded(image // 4 + 48 * number)
            (tmp_path / "mine" / name / f"{index}.png").write_bytes(content)
    asked = ("--stream", f"split:{tmp_path / 'mine'}", "--tasks", 2, "--epochs", 40)
    out = tmp_path / "r"
    assert call("run", *asked, "--out", out).code == 0
    assert call("run", "--resume", "--out", out).code == 0
    (tmp_path / "mine" / "a").rename(tmp_path / "mine" / "z")
    again = call("run", "--resume", "--out", out)
    assert again.code == 1
    assert f"have changed since {out} was started: put the old" in again.err
    # A run begun before checksums were stored may go on.
    (tmp_path / "mine" / "z").rename(tmp_path / "mine" / "a")
    config = json.loads(held(out)["config.json"])
    del config["data"]
    (out / "config.json").write_text(json.dumps(config))
    seal_again(out)
    assert call("run", "--resume", "--out", out).code == 0


@pytest.mark.parametrize("asked", [("--tasks", 5), ("--seeds", 3)])
def test_refused_resume_changes_no_folder(
    asked: tuple[object, ...], folder: Path, tmp_path: Path, call: Call
) -> None:
    root = tmp_path / "both"
    shutil.copytree(folder / "both", root)
    broken = next((root / "seed-2" / "net" / "tasks").iterdir())
    os.truncate(broken, 50)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    again = call("run", "--resume", "--out", root, "--seed", 1, "--seeds", 2, *asked)
    assert again.code == 1
    assert again.err.startswith(f"rankup: {broken} is truncated: 50 of ")
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_page_is_of_all_finished_seeds(folder: Path, tmp_path: Path, call: Call) -> None:
    root = tmp_path / "both"
    shutil.copytree(folder / "both", root)
    again = call("run", "--resume", "--seed", 2, "--out", root)
    assert again.code == 0, again.err
    assert "mean of 2 seeds" in (root / "report.html").read_text()
    # An unfinished one is not part of it.
    lines = root / "seed-1" / "metrics.jsonl"
    lines.write_text(lines.read_text().splitlines(keepends=True)[0])
    assert call("run", "--resume", "--seed", 2, "--out", root).code == 0
    assert "mean of 2 seeds" not in (root / "report.html").read_text()


@pytest.mark.parametrize("tasks", [None, "2"])
def test_damaged_number_of_tasks_is_refused(
    tasks: object, tmp_path: Path, folder: Path, call: Call
) -> None:
    shutil.copytree(folder / "alone", tmp_path / "run")
    edit_config(tmp_path / "run", tasks=tasks)
    again = call("run", "--resume", "--out", tmp_path / "run")
    assert again.code != 0
    assert f"its 'tasks' is {tasks!r}, expected a whole number" in again.err


@pytest.mark.usefixtures("no_page")
def test_single_seed_folder_resumes(tmp_path: Path, folder: Path, call: Call) -> None:
    shutil.copytree(folder / "both" / "seed-1", tmp_path / "both" / "seed-1")
    before = held(tmp_path / "both" / "seed-1")
    again = call("run", "--resume", "--out", tmp_path / "both")
    assert again.code == 0, again.err
    assert held(tmp_path / "both" / "seed-1") == before

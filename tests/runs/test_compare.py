"""Several methods side by side: their runs, failures and refusals."""

import io
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import rankup.runs.compare
from helpers.calling import Call
from helpers.reports import Page
from rankup.errors import RankupError
from rankup.methods import METHODS, MethodInfo
from rankup.methods.finetune import FineTune
from rankup.report.comparison.export import as_csv
from rankup.runs.compare import MethodRuns
from rankup.runs.comparison import read_comparison
from rankup.runs.folder import working_in
from rankup.runs.launch import Launch
from rankup.runs.many_seeds import run_seeds
from rankup.runs.records import read_lines
from rankup.runs.request import Device, Request
from rankup.runs.run import run_together
from rankup.runs.seed_run import SeedRun
from rankup.training.batches import Feed
from rankup.training.engine.learner import Learner

QUICK = ("--tasks", 2, "--epochs", 2, "--width", 8, "--out", "c")


class Diverging(FineTune):
    """Its second task cannot be learned."""

    @property
    def _who(self) -> str:  # whose files it writes
        return f"FineTune with seed {self.seed}"

    def learner(self, feed: Feed) -> Learner:
        if self.learned == 1:
            next(self.body.parameters()).data.fill_(torch.nan)
        return super().learner(feed)


class Buggy(FineTune):
    def learner(self, feed: Feed) -> Learner:
        raise ZeroDivisionError("division by zero\nand more")


class Picky(FineTune):
    def learner(self, feed: Feed) -> Learner:
        raise RankupError("picky wants larger pictures")


class Hungry(FineTune):
    def learner(self, feed: Feed) -> Learner:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.fixture(autouse=True)
def methods(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Additional fake methods, and a working folder."""
    home = ModuleType("rankup.methods.fakes")
    kinds = (Diverging, Buggy, Picky, Hungry)
    home.__dict__.update({kind.__name__: kind for kind in kinds})
    monkeypatch.setitem(sys.modules, home.__name__, home)
    for kind in kinds:
        name = kind.__name__.lower()
        monkeypatch.setitem(METHODS, name, MethodInfo(f"fakes:{kind.__name__}", "fails"))
    sgd = {"optimiser": "sgd", "lr": 0.25}
    monkeypatch.setitem(METHODS, "descent", MethodInfo("finetune:FineTune", "", recipe=sgd))
    monkeypatch.setitem(METHODS, "bound", MethodInfo("finetune:FineTune", "", continual=False))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The method and the seed of every run, in order, all of them in this process."""
    ran: list[tuple[str, int]] = []

    def counted(seeds: list[SeedRun], *, pool: Any, **others: Any) -> dict[SeedRun, str]:
        ran.extend((seed.config.method, seed.config.seed) for seed in seeds)
        return {run: str(why) for run, why in run_together(seeds, **others).items()}

    monkeypatch.setattr(rankup.runs.compare, "run_seeds", counted)
    return ran


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip plots, which take longer than everything else."""
    monkeypatch.setattr("rankup.report.comparison.page.write_comparison_plots", lambda *_: [])


def config_of(method: str, seed: int = 0) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(Path(f"c/{method}/seed-{seed}/config.json").read_text())
    return config


@pytest.mark.usefixtures("no_plots")
def test_every_method_has_its_run_folders(call: Call, tmp_path: Path) -> None:
    done = call("compare", "--methods", "finetune,rank", "--seed", 3, *QUICK[:-2])
    assert done.code == 0, done.err
    root = tmp_path / "runs" / "compare-p-digits"
    for method in ("rank", "finetune"):
        run = root / method / "seed-3"
        assert len(read_lines(run)) == 2
        assert (run / "net").is_dir()
        assert re.search(rf"^ {method} +\d+\.\d\d +−?\d+\.\d\d +[\d,]+ +0 ", done.out, re.M)
        assert re.search(rf"^rankup: {method}: accuracy \d+\.\d\d %", done.err, re.M)
    assert {path.suffix for path in root.glob("table.*")} == {".csv", ".md", ".tex"}
    assert (root / "report.html").exists()


@pytest.mark.usefixtures("no_plots", "one_process")
def test_seeds_have_a_thread_each_and_are_averaged(call: Call) -> None:
    done = call("compare", "--methods", "finetune", "--seeds", 2, *QUICK)
    assert done.code == 0, done.err
    assert len(read_lines(Path("c/finetune/seed-1"))) == 2
    assert re.search(r"^ finetune +\d+\.\d\d ± \d+\.\d\d +−?\d+\.\d\d ± \d", done.out, re.M)
    assert config_of("finetune", 1)["threads"] == 1


@pytest.mark.usefixtures("no_plots")
def test_differences_are_shown_as_tables_and_as_json(
    call: Call, learned: list[tuple[str, int]]
) -> None:
    done = call("compare", "--methods", "descent,finetune", "--seeds", 2, *QUICK)
    assert done.code == 0, done.err
    assert re.search(r"difference to descent *\n", done.out)
    assert re.search(r"^ finetune +[+−]?\d+\.\d\d ± \d+\.\d\d *$", done.out, re.M)
    assert call("report", "c").out == done.out
    again = call("compare", "--methods", "descent", "--seeds", 2, *QUICK, "--resume", "--json")
    assert len(learned) == 4
    told = json.loads(again.out)
    assert told["difference_to"] == "descent"
    by_name = {method["method"]: method for method in told["methods"]}
    assert "difference" not in by_name["descent"]
    one, other = by_name["finetune"], by_name["descent"]
    assert one["difference"] == pytest.approx(one["accuracy"] - other["accuracy"], abs=1e-3)


@pytest.mark.usefixtures("no_plots")
def test_failed_method_leaves_the_others(call: Call) -> None:
    done = call("compare", "--methods", "diverging,buggy,hungry,picky,finetune", *QUICK)
    assert done.code == 1
    assert "Traceback" not in done.err
    lines = done.err.splitlines()
    assert lines[0].startswith("rankup: diverging failed: task 'permutation 02' diverged: the loss")
    assert lines[1] == (
        "rankup: buggy failed: ZeroDivisionError: division by zero (see c/buggy/traceback.txt)"
    )
    assert lines[2].startswith("rankup: hungry failed: the GPU has too little memory for it; fewer")
    assert lines[3] == "rankup: picky failed: picky wants larger pictures"
    assert lines[4].startswith("rankup: finetune: accuracy ")
    assert lines[5:] == ["rankup: 4 of 5 methods failed: diverging, buggy, hungry, picky"]
    assert 'raise ZeroDivisionError("division' in Path("c/buggy/traceback.txt").read_text()
    # What worked is shown, and comes first; what failed says so.
    shown = re.findall(r"^ (\w+) +([\d.]+|failed) ", done.out, re.M)
    assert [name for name, _ in shown] == ["finetune", "diverging", "buggy", "hungry", "picky"]
    assert [result for _, result in shown[1:]] == ["failed"] * 4
    assert len(read_lines(Path("c/diverging/seed-0"))) == 1
    page = Page(Path("c/report.html"))
    assert "buggy failed: ZeroDivisionError: division by zero" in page.words
    assert "Of 5 methods, 1 learned 2 tasks of p-digits; the best" in page.words


def test_page_where_nothing_worked(call: Call) -> None:
    assert call("compare", "--methods", "buggy,diverging", *QUICK).code == 1
    page = Page(Path("c/report.html"))
    assert "None of 2 methods has learned p-digits yet" in page.words
    assert "img" not in page.tags
    assert as_csv(read_comparison(Path("c"))).splitlines()[1].startswith("buggy,yes,0,")


def test_report_writes_the_same_page_again(call: Call) -> None:
    ran = call("compare", "--methods", "finetune,bound", *QUICK)
    files = [path for path in Path("c").iterdir() if path.suffix in (".html", ".csv", ".png")]
    assert len(files) == 8
    before = {path: path.read_bytes() for path in files}
    for path in files:
        path.unlink()
    seen = call("report", "c")
    assert (seen.code, seen.out) == (0, ran.out)
    assert {path: path.read_bytes() for path in files} == before


def test_gpu_memory_of_a_method_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    freed = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(True))
    rankup.runs.compare.release("ewc", "cuda")
    assert freed == [True]

    def broken() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(RankupError, match="the GPU has not responded since ewc failed; run"):
        rankup.runs.compare.release("ewc", "cuda")


@pytest.mark.usefixtures("no_plots")
def test_finished_runs_are_not_repeated(call: Call, learned: list[tuple[str, int]]) -> None:
    first = call("compare", "--methods", "finetune,buggy", *QUICK)
    assert first.code == 1
    times = {path: path.stat().st_mtime_ns for path in Path("c/finetune").rglob("*")}
    learned.clear()
    METHODS["buggy"] = MethodInfo("finetune:FineTune", "no more")
    again = call("compare", "--methods", "buggy,rank", *QUICK, "--resume")
    assert again.code == 0, again.err
    assert learned == [("buggy", 0), ("rank", 0)]
    assert {path: path.stat().st_mtime_ns for path in Path("c/finetune").rglob("*")} == times
    assert not Path("c/buggy/traceback.txt").exists()
    results = [row.split()[:3] for row in again.out.splitlines()]
    (row,) = [row for row in first.out.splitlines() if row.startswith(" finetune")]
    assert row.split()[:3] in results
    assert read_comparison(Path("c")).failed == []


@pytest.mark.usefixtures("no_plots")
def test_unfinished_seeds_resume(
    call: Call, learned: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("compare", "--methods", "finetune", *QUICK).code == 0
    whole = [{**line, "seconds": 0} for line in read_lines(Path("c/finetune/seed-0"))]
    # A run that was stopped after its first task is one that failed at its second.
    info = METHODS["diverging"]
    monkeypatch.setitem(METHODS, "finetune", info)
    out = (*QUICK[:-1], "d")
    assert call("compare", "--methods", "finetune", *out).code == 1
    assert len(read_lines(Path("d/finetune/seed-0"))) == 1
    monkeypatch.setitem(METHODS, "finetune", MethodInfo("finetune:FineTune", ""))
    learned.clear()
    done = call("compare", "--methods", "finetune", *out, "--resume", "--seeds", 2)
    assert done.code == 0, done.err
    assert learned == [("finetune", 0), ("finetune", 1)]
    after = [{**line, "seconds": 0} for line in read_lines(Path("d/finetune/seed-0"))]
    assert after == whole
    assert re.search(r"^ finetune +\d+\.\d\d ± \d", done.out, re.M)


@pytest.mark.usefixtures("no_plots")
def test_ctrl_c_stops_everything(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def stopped(seeds: list[SeedRun], **others: Any) -> dict[SeedRun, str]:
        ran.append(seeds[0].config.method)
        if seeds[0].config.method == "rank":
            raise KeyboardInterrupt
        return run_seeds(seeds, **others)

    monkeypatch.setattr(rankup.runs.compare, "run_seeds", stopped)
    done = call("compare", "--methods", "finetune,rank,bound", *QUICK)
    assert done.code == 130
    assert (
        done.err.splitlines()[-1]
        == "rankup: stopped; run the same command with --resume to continue"
    )
    assert ran == ["finetune", "rank"]
    rows = [(entry.method, len(entry.runs)) for entry in read_comparison(Path("c")).entries]
    assert rows == [("finetune", 1), ("rank", 0), ("bound", 0)]
    seen = call("report", "c")
    assert seen.code == 0
    assert re.search(r"^ rank +unfinished +–", seen.out, re.M)


@pytest.mark.usefixtures("no_plots")
def test_options_go_to_methods_that_have_them(call: Call) -> None:
    both = ("compare", "--methods", "finetune,supsup", *QUICK, "--epochs", 4)
    done = call(*both, "--share", 0.4)
    assert done.code == 0, done.err
    options = [config_of(name)["options"] for name in ("finetune", "supsup")]
    assert [own.get("share") for own in options] == [None, 0.4]
    other = call(*both, "--share", 0.3, "--resume")
    assert (other.code, other.out) == (1, "")
    assert "c was started with share 0.4, not 0.3" in other.err
    none = call("compare", "--methods", "finetune,rank", "--out", "d", "--share", 0.4)
    assert none.err == "rankup: none of finetune, rank has an option --share\n"
    ranks = call("compare", "--methods", "finetune,ewc", "--rank", "3,1", *QUICK)
    assert ranks.code != 0
    assert ranks.err == "rankup: --rank is for the method rank, which is not compared\n"
    assert not Path("d").exists()


@pytest.mark.usefixtures("no_plots")
def test_given_settings_override_a_methods_own(call: Call) -> None:
    assert call("compare", "--methods", "descent,finetune", *QUICK, "--batch", 32).code == 0
    descent, finetune = config_of("descent")["recipe"], config_of("finetune")["recipe"]
    assert (descent["optimiser"], descent["lr"], descent["batch"]) == ("sgd", 0.25, 32)
    assert (finetune["optimiser"], finetune["lr"], finetune["batch"]) == ("adam", 0.01, 32)
    out = (*QUICK[:-1], "d", "--lr", 0.5)
    assert call("compare", "--methods", "descent", *out).code == 0
    given = json.loads(Path("d/descent/seed-0/config.json").read_text())["recipe"]
    assert (given["optimiser"], given["lr"]) == ("sgd", 0.5)


@pytest.mark.parametrize(("rank", "lr"), [("11,1", 0.01), ("0,0", 0.02), ("0,1", 0.01)])
def test_seeded_factors_change_only_rank(rank: str, lr: float, tmp_path: Path) -> None:
    launch = Launch(Request(tasks=1, rank=rank, seeded="64", device=Device.cpu))
    recipes = {
        method: launch.of(method, {}, {0: tmp_path})[0].config.recipe
        for method in ("rank", "finetune")
    }
    assert recipes["rank"]["lr"] == lr
    assert (recipes["finetune"]["lr"], recipes["finetune"]["weight_decay"]) == (0.01, 0.0)


def test_progress_counts_methods_and_tasks() -> None:
    from rich.console import Console
    from rich.progress import Progress as Bars

    from rankup.cli.progress import MethodBars
    from rankup.runs.seed_run import Progress

    bars = Bars(console=Console(file=io.StringIO()))
    watch = MethodBars(bars, tasks=10, methods=2)
    whole = bars.tasks[0]
    watch.begin("ewc", {0: 0, 1: 6})  # of 20 tasks 14 are left
    watch.show(Progress(1, 1, 7, 1, 2, 0.1, 0.9))  # seed 1: 7.5 tasks
    watch.show(Progress(0, 1, 2, 2, 2, 0.1, 0.9))  # seed 0: 3 tasks
    assert whole.description == "method 1/2: ewc"
    assert whole.completed == pytest.approx((1.5 + 3) / 14)
    assert [task.description for task in bars.tasks[1:]] == [
        "seed 1, task 8/10, epoch 1/2",
        "seed 0, task 3/10, epoch 2/2",
    ]
    watch.end()
    watch.begin("hat", {0: 0, 1: 0})
    watch.show(Progress(0, 2, 4, 2, 2, 0.1, 0.9))  # both seeds: 5 tasks
    assert whole.description == "method 2/2: hat"
    assert whole.completed == pytest.approx(1.5)
    assert [task.description for task in bars.tasks[1:]] == ["2 seeds, task 5/10, epoch 2/2"]
    watch.end()
    assert whole.finished


REFUSED = {
    "method": (["--methods", "rank,magic"], "there is no method 'magic', only rank, finetune"),
    "twice": (["--methods", "rank,rank"], "the method 'rank' is named 2 times, not once"),
    "stream": (["--methods", "rank", "--stream", "p-digit"], "there is no stream 'p-digit'"),
    "crop": (["--tasks", "2", "--crop", "9"], "images of 8×8 pixels can be padded"),
    "recipe": (["--recipe", "best"], "there is no recipe 'best', only default, paper"),
    "folder": (["--methods", "rank", "--out", "mine"], "mine holds other files: name a new"),
    "file": (["--methods", "rank", "--out", "mine/x"], "mine/x is a file, not a folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_in_one_sentence(case: str, call: Call, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").write_text("thesis")
    arguments, sentence = REFUSED[case]
    done = call("compare", *arguments)
    assert done.code == 1
    assert done.err.startswith(f"rankup: {sentence}")
    assert done.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) in (["mine"], ["cache", "mine"])


def test_seeds_must_be_at_least_one(call: Call) -> None:
    done = call("compare", "--methods", "rank", "--seeds", 0)
    assert done.code == 2
    assert "--seeds" in done.err


@pytest.mark.usefixtures("no_plots")
def test_existing_comparison_is_refused(call: Call, learned: list[tuple[str, int]]) -> None:
    assert call("compare", "--methods", "finetune", *QUICK).code == 0
    learned.clear()
    again = call("compare", "--methods", "rank", *QUICK)
    assert (again.code, again.err) == (
        1,
        "rankup: c already holds a comparison: add --resume to continue it, or --out\n",
    )
    longer = call("compare", "--methods", "rank", *QUICK, "--resume", "--epochs", 3)
    assert longer.code == 1
    assert longer.err.startswith("rankup: c was started with epochs 2, not 3: continue with")
    other = call("compare", "--methods", "rank", *QUICK, "--resume", "--lr", 0.5)
    assert other.err.startswith("rankup: c was started with lr left out, not 0.5: continue")
    assert learned == []
    Path("c/compare.json").write_text('{"asked": {}}')
    broken = call("compare", "--methods", "rank", *QUICK, "--resume")
    assert broken.err.startswith("rankup: c/compare.json is truncated or edited")


@pytest.mark.usefixtures("no_plots")
def test_locked_comparison_is_refused(
    call: Call, learned: list[tuple[str, int]], tmp_path: Path
) -> None:
    Path("c").mkdir()
    with working_in([Path("c")]):
        done = call("compare", "--methods", "finetune", *QUICK)
    assert (done.code, learned) == (1, [])
    assert "another process is using c: wait for it" in done.err
    # What the other process left behind does not get in the way.
    assert call("compare", "--methods", "finetune", *QUICK).code == 0


def test_comparison_keeps_what_another_added(tmp_path: Path) -> None:
    request = Request(tasks=2, width=8, recipe_options={"epochs": 1}, resume=True)
    launch, root = Launch(request), tmp_path / "c"
    one, other = (MethodRuns(launch, [name], root) for name in ("finetune", "bound"))
    for runs in (one, other):
        runs.run(Quiet(), lambda _: None)
    assert [entry.method for entry in read_comparison(root).entries] == ["finetune", "bound"]


class Quiet:
    def begin(self, method: str, learned: object) -> None: ...

    def show(self, now: object) -> None: ...

    def end(self) -> None: ...

"""Several methods side by side: what is run, what becomes of one that fails, what is shown."""

import csv
import io
import itertools
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgba
from matplotlib.figure import Figure

import rankup.compare
from rankup.cli import main
from rankup.errors import RankupError
from rankup.feed import Feed
from rankup.methods import METHODS, MethodInfo
from rankup.methods.finetune import FineTune
from rankup.metrics import AccuracyMatrix
from rankup.replicas import Seed, run_seeds
from rankup.report import methods_table, read_comparison, write_comparison
from rankup.report.comparison import Comparison, Entry
from rankup.report.comparison_plots import averages_plot, matrices_plot, memory_plot
from rankup.report.export import as_csv, as_latex, as_markdown
from rankup.report.figures import write_figures
from rankup.report.placement import Box, place_labels, spread_apart
from rankup.report.runs import Run
from rankup.report.theme import DARK, LIGHT, Theme, colour, line_style, marker
from rankup.run import SeedRun, read_lines, run_together
from rankup.steps import Learner
from test_report import Page, printed, write_run

QUICK = ("--tasks", 2, "--epochs", 2, "--width", 8, "--out", "c")


class Diverging(FineTune):
    """Its second task cannot be learned."""

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
def methods(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """More methods than there are, a folder to be in, and as many threads after it as before."""
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
    monkeypatch.setenv("COLUMNS", "80")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


class Done(NamedTuple):
    code: int
    out: str
    err: str


Call = Callable[..., Done]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """`rankup` in this process."""

    def call(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["rankup", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            main()
        return Done(int(exit.value.code or 0), *capsys.readouterr())

    return call


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The method and the seed of every run, as they are run, all of them in this process."""
    ran: list[tuple[str, int]] = []

    def counted(seeds: list[Seed], **others: Any) -> dict[int, str]:
        ran.extend((seed.config.method, seed.config.seed) for seed in seeds)
        runs = [SeedRun(seed.config, seed.stream(), seed.out, seed.resume) for seed in seeds]
        failed = run_together(runs, **others)
        return {seed.config.seed: str(failed[seed.out]) for seed in seeds if seed.out in failed}

    monkeypatch.setattr(rankup.compare, "run_seeds", counted)
    return ran


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than all else."""
    monkeypatch.setattr("rankup.report.comparison_page.write_comparison_plots", lambda *_: [])


def config_of(method: str, seed: int = 0) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(Path(f"c/{method}/seed-{seed}/config.json").read_text())
    return config


# Running


def test_every_method_has_a_folder_with_its_runs(call: Call, tmp_path: Path) -> None:
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


@pytest.mark.usefixtures("no_plots")
def test_seeds_run_in_processes_and_are_told_as_mean_and_deviation(call: Call) -> None:
    done = call("compare", "--methods", "finetune", "--seeds", 2, *QUICK)
    assert done.code == 0, done.err
    assert len(read_lines(Path("c/finetune/seed-1"))) == 2
    assert re.search(r"^ finetune +\d+\.\d\d ± \d+\.\d\d +−?\d+\.\d\d ± \d", done.out, re.M)
    assert config_of("finetune", 1)["threads"] == 1


def test_a_method_that_fails_leaves_the_others_to_go_on(call: Call) -> None:
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
    assert "Of 5 methods 1 learned 2 tasks of p-digits; the best" in page.words


def test_a_page_where_nothing_worked(call: Call) -> None:
    assert call("compare", "--methods", "buggy,diverging", *QUICK).code == 1
    page = Page(Path("c/report.html"))
    assert "None of 2 methods has learned p-digits yet" in page.words
    assert "img" not in page.tags
    assert as_csv(read_comparison(Path("c"))).splitlines()[1].startswith("buggy,yes,0,")


def test_what_a_method_left_on_a_gpu_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    freed = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(True))
    rankup.compare.release("ewc", "cuda")
    assert freed == [True]

    def broken() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(RankupError, match="the GPU answers no more since ewc failed; the same"):
        rankup.compare.release("ewc", "cuda")


@pytest.mark.usefixtures("no_plots")
def test_what_is_finished_is_not_run_again(call: Call, learned: list[tuple[str, int]]) -> None:
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
def test_unfinished_seeds_go_on_where_they_were(
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

    def stopped(seeds: list[Seed], **others: Any) -> dict[int, str]:
        ran.append(seeds[0].config.method)
        if seeds[0].config.method == "rank":
            raise KeyboardInterrupt
        return run_seeds(seeds, **others)

    monkeypatch.setattr(rankup.compare, "run_seeds", stopped)
    done = call("compare", "--methods", "finetune,rank,bound", *QUICK)
    assert done.code == 130
    assert done.err.splitlines()[-1] == "rankup: stopped; the same command with --resume goes on"
    assert ran == ["finetune", "rank"]
    rows = [(entry.method, len(entry.runs)) for entry in read_comparison(Path("c")).entries]
    assert rows == [("finetune", 1), ("rank", 0), ("bound", 0)]
    seen = call("report", "c")
    assert seen.code == 0
    assert re.search(r"^ rank +unfinished +–", seen.out, re.M)


@pytest.mark.usefixtures("no_plots")
def test_a_methods_own_settings_come_before_those_that_are_given(call: Call) -> None:
    assert call("compare", "--methods", "descent,finetune", *QUICK, "--batch", 32).code == 0
    descent, finetune = config_of("descent")["recipe"], config_of("finetune")["recipe"]
    assert (descent["optimiser"], descent["lr"], descent["batch"]) == ("sgd", 0.25, 32)
    assert (finetune["optimiser"], finetune["lr"], finetune["batch"]) == ("adam", 0.01, 32)
    out = (*QUICK[:-1], "d", "--lr", 0.5)
    assert call("compare", "--methods", "descent", *out).code == 0
    given = json.loads(Path("d/descent/seed-0/config.json").read_text())["recipe"]
    assert (given["optimiser"], given["lr"]) == ("sgd", 0.5)


def test_progress_counts_methods_and_what_is_left_of_them() -> None:
    from rich.console import Console
    from rich.progress import Progress as Bars

    from rankup.progress import MethodBars
    from rankup.run import Progress

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
    "none": (["--methods", ""], "there is no method '', only rank"),
    "twice": (["--methods", "rank,rank"], "the method 'rank' is named 2 times, not once"),
    "stream": (["--methods", "rank", "--stream", "p-digit"], "there is no stream 'p-digit'"),
    "epochs": (["--stream", "p-mnist", "--epochs", "0"], "epochs must be at least 1, got 0"),
    "recipe": (["--recipe", "best"], "there is no recipe 'best', only default, paper"),
    "folder": (["--methods", "rank", "--out", "mine"], "mine holds other files: name a new"),
    "file": (["--methods", "rank", "--out", "mine/x"], "mine/x holds other files: name a new"),
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
def test_a_comparison_that_is_there_is_refused(call: Call, learned: list[tuple[str, int]]) -> None:
    assert call("compare", "--methods", "finetune", *QUICK).code == 0
    learned.clear()
    again = call("compare", "--methods", "rank", *QUICK)
    assert (again.code, again.err) == (
        1,
        "rankup: c holds a comparison already: add --resume to go on with it, or --out\n",
    )
    longer = call("compare", "--methods", "rank", *QUICK, "--resume", "--epochs", 3)
    assert longer.code == 1
    assert longer.err.startswith("rankup: c was begun with epochs 2, not 3: go on with the same")
    other = call("compare", "--methods", "rank", *QUICK, "--resume", "--lr", 0.5)
    assert other.err.startswith("rankup: c was begun with lr None, not 0.5: go on")
    assert learned == []
    Path("c/compare.json").write_text('{"asked": {}}')
    broken = call("compare", "--methods", "rank", *QUICK, "--resume")
    assert broken.err.startswith("rankup: c/compare.json is truncated or edited")


# What is shown


ROWS = {  # of each method, for each seed
    "rank": [[[0.9], [0.9, 0.8]], [[0.8], [0.8, 0.8]]],
    "fine_tune": [[[0.9], [0.7, 0.8]], [[0.8], [0.7, 0.9]]],
    "joint|all": [[[0.95], [0.95, 0.95]], [[0.95], [0.95, 0.95]]],
    "ewc": [[[0.9], [0.6, 0.8]], [[0.9]]],  # the second seed failed at its second task
    "a<b>": [[[0.9]], [[0.9]]],
}
FAILED = {
    "ewc": "seed 1: task 'b' diverged",
    "a<b>": "seed 0: task 'b' was not learned (and 1 more seeds)",
    "rank": "long ago",  # but then it worked
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A comparison of which all results are known."""
    root = tmp_path / "known"
    for method, seeds in ROWS.items():
        for seed, rows in enumerate(seeds):
            sgd = method in ("ewc", "a<b>")
            recipe = {"name": "default", "epochs": 7, "lr": 0.1 if sgd else 0.01}
            own = {"method": method, "seed": seed, "tasks": 2}
            options = {"ewc": {"strength": 5.0}, "joint|all": {"size": "full"}}.get(method, {})
            folder = root / method / f"seed-{seed}"
            write_run(folder, rows, **own, options=options, recipe=recipe)
    index = {
        "asked": {"stream": "p-digits"},
        "seeds": [0, 1],
        "methods": {method: method != "joint|all" for method in ROWS},
        "failed": FAILED,
    }
    (root / "compare.json").write_text(json.dumps(index))
    return root


@pytest.fixture
def comparison(folder: Path) -> Comparison:
    return read_comparison(folder)


# Of rank the averages are 85 and 80 and nothing is forgotten; of fine_tune 75 and 80, and 20 and 10
# points are. The deviation of two numbers is their distance over √2.
CELLS = [
    ["joint|all*", "95.00 ± 0.00", "0.00 ± 0.00", "15,000", "0", "5.0 s"],
    ["rank", "82.50 ± 3.54", "0.00 ± 0.00", "15,000", "0", "5.0 s"],
    ["fine_tune", "77.50 ± 3.54", "15.00 ± 7.07", "15,000", "0", "5.0 s"],
    ["ewc (1 of 2 seeds)", "70.00", "30.00", "15,000", "0", "5.0 s"],
    ["a<b>", "failed", "–", "–", "–", "–"],
]


def test_the_table_is_as_worked_out_by_hand(comparison: Comparison) -> None:
    text = printed(methods_table(comparison))
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    for cells in CELLS:
        assert cells in rows or cells[0].startswith("ewc"), cells
    assert ["ewc (1 of 2", "70.00", "30.00", "15,000", "0", "5.0 s"] in [
        [row[0].removesuffix(" seeds)"), *row[1:]] for row in rows
    ]
    words = " ".join(text.split())
    assert "mean ± standard deviation of 2 seeds; parameters" in words
    assert "* not continual: it has the data of all tasks at once" in words


def test_a_wide_table_fits_80_columns_without_breaking_names(tmp_path: Path) -> None:
    run = known_run([[0.9912], [0.4912, 0.9012]], parameters=10_454_728, buffer=3_920_000)
    entries = [entry("orthog-subspace", 1, [run, known_run([[0.1], [0.5, 0.4]], seconds=3599)])]
    text = printed(methods_table(Comparison(tmp_path, "s-miniimagenet", 2, entries)))
    assert re.search(r"^ orthog-subspace  \d\d\.\d\d ± \d+\.\d\d ", text, re.M)
    assert "…" not in text


def test_the_csv_has_results_and_settings_of_every_method(comparison: Comparison) -> None:
    text = as_csv(comparison)
    assert text.splitlines()[0].startswith("method,continual,seeds,failed,accuracy,accuracy_std,")
    assert text.splitlines()[0].endswith(",options.size,options.strength")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["method"] for row in rows] == ["joint|all", "rank", "fine_tune", "ewc", "a<b>"]
    rank, tuned, ewc, failed = rows[1:]
    assert (rank["accuracy"], rank["accuracy_std"]) == ("82.5", "3.5355")
    assert (tuned["forgetting"], tuned["forgetting_std"]) == ("15.0", "7.0711")
    assert (ewc["seeds"], ewc["accuracy"], ewc["accuracy_std"]) == ("1", "70.0", "")
    assert (ewc["failed"], rank["failed"]) == ("seed 1: task 'b' diverged", "")
    assert (failed["accuracy"], failed["parameters"], failed["recipe.lr"]) == ("", "", "0.1")
    assert [row["continual"] for row in rows] == ["no", "yes", "yes", "yes", "yes"]
    assert (rank["parameters"], rank["buffer"], rank["seconds"]) == ("15000.0", "0.0", "5.0")
    assert {row["recipe.epochs"] for row in rows} == {"7"}
    assert [row["recipe.lr"] for row in rows] == ["0.01", "0.01", "0.01", "0.1", "0.1"]
    assert [row["options.strength"] for row in rows] == ["", "", "", "5.0", ""]
    assert rank["rank"] == "11,1"
    assert rank["versions.torch"] == "2.13.0"


def test_markdown(comparison: Comparison) -> None:
    lines = as_markdown(comparison).splitlines()
    assert lines[:4] == [
        "| method | accuracy % | forgetting | parameters | replay buffer | time |",
        "|---|---:|---:|---:|---:|---:|",
        r"| joint\|all\* | 95.00 ± 0.00 | 0.00 ± 0.00 | 15,000 | 0 | 5.0 s |",
        "| rank | 82.50 ± 3.54 | 0.00 ± 0.00 | 15,000 | 0 | 5.0 s |",
    ]
    assert lines[6] == r"| a\<b\> | failed | – | – | – | – |"
    assert "ewc failed: seed 1: task 'b' diverged." in lines
    assert not any(line.startswith("rank failed") for line in lines)


def test_latex(comparison: Comparison) -> None:
    lines = as_latex(comparison).splitlines()
    table = lines[lines.index(r"\begin{tabular}{lrrrrr}") :]
    assert table == [
        r"\begin{tabular}{lrrrrr}",
        r"\toprule",
        r"method & accuracy \% & forgetting & parameters & replay buffer & time \\",
        r"\midrule",
        r"joint|all* & 95.00 $\pm$ 0.00 & 0.00 $\pm$ 0.00 & 15,000 & 0 & 5.0 s \\",
        r"rank & 82.50 $\pm$ 3.54 & 0.00 $\pm$ 0.00 & 15,000 & 0 & 5.0 s \\",
        r"fine\_tune & 77.50 $\pm$ 3.54 & 15.00 $\pm$ 7.07 & 15,000 & 0 & 5.0 s \\",
        r"ewc (1 of 2 seeds) & 70.00 & 30.00 & 15,000 & 0 & 5.0 s \\",
        r"a<b> & failed & -- & -- & -- & -- \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    assert all(line.startswith("% ") for line in lines[: lines.index(table[0])])


def test_latex_is_escaped() -> None:
    odd = entry(r"\a_b & 5% $x$ #{~^}", 1, [known_run([[0.5], [0.6, 0.5]])])
    text = as_latex(Comparison(Path("."), "s\nx", 1, [odd]))
    assert (
        r"\textbackslash{}a\_b \& 5\% \$x\$ \#\{\textasciitilde{}\textasciicircum{}\} & 55.00 & "
        r"$-$10.00 & 7 & 0 & 1.0 s \\"
    ) in text.splitlines()
    assert "% s x" in text.splitlines()


def test_the_page_holds_all_plots_and_settings(folder: Path, comparison: Comparison) -> None:
    page = Page(write_comparison(comparison, folder / "report.html"))
    words = " ".join(page.words.split())
    assert page.html.startswith("<!doctype html>")
    assert not re.search(r"https?:|url\(|@import|<script", page.html)
    assert all(reference.startswith("data:") for reference in page.references)
    assert page.tags.count("img") == page.tags.count("source") == 3
    assert {path.name for path in folder.glob("*.png")} == {
        f"{name}{theme}.png"
        for name in ("average", "memory", "matrices")
        for theme in ("", "-dark")
    }
    for row in CELLS:
        assert " ".join(row) in words
    assert "b" not in page.tags
    assert "Of 5 methods 4 learned 2 tasks of p-digits with 2 seeds each; the best" in words
    assert "the best on average is rank: 82.50 ± 3.54 %, forgetting 0.00 ± 0.00." in words
    own, shared = words.split("Of each method, where they differ")[1].split("Of all methods")
    assert "rank lr 0.01" in own
    assert "ewc strength 5.0 lr 0.1" in own or "ewc lr 0.1 strength 5.0" in own
    assert "epochs" not in own
    assert "epochs 7" in shared
    assert "lr" not in shared.split()
    assert "width 256" in shared


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
    elsewhere = call("report", "c", "--out", "page/p.html")
    assert elsewhere.code == 0
    assert Path("page/p.html").read_bytes() == before[Path("c/report.html")]
    assert Path("page/table.tex").exists()


# Plots


def known_run(
    rows: list[list[float]], parameters: float = 7, buffer: float = 0, seconds: float = 0.5
) -> Run:
    line = {"task": "t", "parameters": parameters, "buffer": buffer, "seconds": seconds}
    return Run(Path("."), {}, [line] * len(rows), AccuracyMatrix(rows), {}, {})


def entry(name: str, number: int, runs: list[Run]) -> Entry:
    return Entry(name, number, True, len(runs), runs, [], "")


def many(accuracy: Callable[[int], float], stored: Callable[[int], float]) -> list[Entry]:
    """Fourteen methods with two seeds and three tasks each."""
    names = ["rank", "finetune", "orthog-subspace", "parallel rank 4", "a-gem", "ewc", "hat"] * 2
    return [
        entry(
            name,
            index + 1,
            [
                known_run([[a], [a, a], [a, a, a + 0.01 * seed]], parameters=stored(index))
                for seed in range(2)
            ],
        )
        for index, name in enumerate(names)
        for a in [accuracy(index)]
    ]


LIKENESSES = {
    "all alike": many(lambda i: 0.9, lambda i: 300_000),
    "in a column": many(lambda i: 0.9 + 0.002 * i, lambda i: 300_000),
    "in a row": many(lambda i: 0.9, lambda i: 300_000 + 5_000 * i),
    "in a corner": many(lambda i: 0.98 if i else 0.1, lambda i: 100_000 if i else 9e6),
    "far apart": many(lambda i: 0.05 * i, lambda i: 1_000 * 2**i),
}


@pytest.mark.parametrize("likeness", LIKENESSES)
@pytest.mark.parametrize("plot", [averages_plot, memory_plot])
def test_no_label_of_a_plot_covers_another(plot: Any, likeness: str) -> None:
    entries = LIKENESSES[likeness]
    figure = plot(entries, LIGHT)
    renderer = FigureCanvasAgg(figure).get_renderer()
    texts = [*figure.texts, *figure.axes[0].texts]
    assert len(texts) == len(entries) == 14
    boxes = [text.get_window_extent(renderer) for text in texts]
    for one, other in itertools.combinations(boxes, 2):
        assert not Box(*one.extents).overlaps(Box(*other.extents))
    width, height = figure.bbox.size
    for box in boxes:
        assert Box(*box.extents).inside(Box(0, 0, width, height))


@pytest.mark.parametrize("seed", range(20))
def test_labels_lie_near_their_points_and_over_nothing(seed: int) -> None:
    draw = random.Random(seed)
    frame = Box(0, 0, 900, 500)
    points = [(draw.uniform(20, 880), draw.uniform(20, 480)) for _ in range(14)]
    sizes = [(draw.uniform(30, 170), 16.0) for _ in points]
    boxes = place_labels(points, sizes, frame, clear=10)
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)
    for (x, y), (width, height), box in zip(points, sizes, boxes, strict=True):
        assert (box.right - box.left, box.top - box.bottom) == pytest.approx((width, height))
        assert box.inside(frame)
        assert not any(box.overlaps(Box(a - 10, b - 10, a + 10, b + 10)) for a, b in points)
        apart = max(box.left - x, x - box.right, box.bottom - y, y - box.top)
        assert apart < 60


def test_a_lone_label_stands_right_of_its_point() -> None:
    (box,) = place_labels([(50, 50)], [(40, 10)], Box(0, 0, 200, 100), clear=5)
    assert box == pytest.approx((55.25, 45, 95.25, 55))
    (box,) = place_labels([(190, 50)], [(40, 10)], Box(0, 0, 200, 100), clear=5)
    assert box.right <= 190


def test_places_are_spread_no_further_than_it_takes() -> None:
    assert spread_apart([3, 1, 9], gap=1, low=0, high=10) == [3, 1, 9]
    assert spread_apart([5, 5, 5], gap=1, low=0, high=10) == [4, 5, 6]
    assert spread_apart([10, 10], gap=1, low=0, high=10) == [9, 10]
    assert spread_apart([0, 0], gap=1, low=0, high=10) == [0, 1]
    draw = random.Random(0)
    for _ in range(50):
        wanted = [draw.uniform(0, 10) for _ in range(14)]
        places = spread_apart(wanted, gap=0.7, low=0, high=10)
        in_order = [place for _, place in sorted(zip(wanted, places, strict=True))]
        assert all(b - a >= 0.7 - 1e-9 for a, b in itertools.pairwise(in_order))
        assert -1e-9 <= min(places) <= max(places) <= 10 + 1e-9


def test_lines_bands_and_maps_are_the_means_of_all_seeds() -> None:
    seeds = [known_run([[0.9], [0.5, 0.7]]), known_run([[0.7], [0.3, 0.7]])]
    entries = [entry("one", 1, seeds), entry("two", 2, seeds[:1])]
    axes = averages_plot(entries, LIGHT).axes[0]
    assert axes.lines[0].get_ydata() == pytest.approx([80, 55])
    assert axes.lines[1].get_ydata() == pytest.approx([90, 60])
    (band,) = axes.collections  # a single seed has none
    heights = band.get_paths()[0].vertices[:, 1]
    assert (min(heights), max(heights)) == pytest.approx((55 - 50**0.5, 80 + 200**0.5))
    maps = [panel.images[0].get_array() for panel in matrices_plot(entries).axes[:2]]
    assert maps[0][1].tolist() == pytest.approx([40, 70])
    assert maps[1][1].tolist() == pytest.approx([50, 70])
    scales = {panel.images[0].get_clim() for panel in matrices_plot(entries).axes[:2]}
    assert scales == {(40, 90)}


def test_plots_leave_no_light_colour_in_the_dark(tmp_path: Path) -> None:
    made: dict[str, Figure] = {}

    def make(theme: Theme) -> dict[str, Figure]:
        entries = LIKENESSES["far apart"]
        made.update(lines=averages_plot(entries, theme), points=memory_plot(entries, theme))
        return made

    write_figures(make, tmp_path)
    for figure in made.values():
        assert set(colours(figure)) == {*DARK.runs, DARK.text, DARK.muted, DARK.line, DARK.surface}


def colours(figure: Figure) -> Iterator[str]:
    """Of all that is drawn."""
    for artist in figure.findobj():
        for part in ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor"):
            if hasattr(artist, f"get_{part}") and artist.get_visible():
                found = getattr(artist, f"get_{part}")()
                each = found if np.ndim(found) == 2 else [found]
                yield from (to_hex(one) for one in each if to_rgba(one)[3])


def test_memory_counts_the_buffer() -> None:
    run = known_run([[0.9]], parameters=100, buffer=900)
    points = memory_plot([entry("one", 1, [run])], LIGHT).axes[0].lines
    assert (points[0].get_xdata()[0], points[0].get_ydata()[0]) == pytest.approx((1000, 90))


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_fourteen_methods_look_different(theme: Any) -> None:
    looks = {(colour(theme, i), line_style(theme, i)) for i in range(14)}
    assert len(looks) == len({marker(i) for i in range(14)}) == 14
    assert len(LIGHT.runs) == len(DARK.runs)

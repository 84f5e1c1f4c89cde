"""The table of a comparison in all its forms, and its page."""

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest

from helpers.calling import Call
from helpers.comparisons import entry, known_run
from helpers.reports import Page, printed, write_run
from rankup.errors import RankupError
from rankup.report.comparison.export import as_csv, as_json, as_latex, as_markdown
from rankup.report.comparison.page import write_comparison
from rankup.report.comparison.text import cells, differences_table, methods_table
from rankup.runs.comparison import Comparison, read_comparison

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
    """A comparison with known results."""
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


# For rank the averages are 85 and 80 and nothing is forgotten; for fine_tune they are 75 and 80,
# and 20 and 10 points are forgotten. The deviation of two numbers is their distance over √2.
CELLS = [
    ["joint|all*", "95.00 ± 0.00", "0.00 ± 0.00", "15,000", "0", "5.0 s"],
    ["rank", "82.50 ± 3.54", "0.00 ± 0.00", "15,000", "0", "5.0 s"],
    ["fine_tune", "77.50 ± 3.54", "15.00 ± 7.07", "15,000", "0", "5.0 s"],
    ["ewc (1 of 2 seeds)", "70.00", "30.00", "15,000", "0", "5.0 s"],
    ["a<b>", "failed", "–", "–", "–", "–"],
]

# To rank, which is given first: by 10 and 15 points, and by −10 and 0. The standard error is half
# the distance between two numbers. Of ewc only one seed is there.
DIFFERENCES = ["+12.50 ± 2.50", "–", "−5.00 ± 5.00", "–", "–"]


def test_table_is_as_worked_out_by_hand(comparison: Comparison) -> None:
    text = printed(methods_table(comparison))
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    for row in CELLS:
        assert row in rows or row[0].startswith("ewc"), row
    assert ["ewc (1 of 2", "70.00", "30.00", "15,000", "0", "5.0 s"] in [
        [row[0].removesuffix(" seeds)"), *row[1:]] for row in rows
    ]
    words = " ".join(text.split())
    assert "mean ± standard deviation of 2 seeds; parameters" in words
    assert "* not continual: it has the data of all tasks at once" in words


def test_differences_are_as_worked_out_by_hand(comparison: Comparison) -> None:
    table = differences_table(comparison)
    assert table
    text = printed(table)
    assert re.search(r"difference to rank *\n", text)
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    assert [row for row in rows if "±" in row[-1] and len(row) == 2] == [
        ["joint|all", "+12.50 ± 2.50"],
        ["fine_tune", "−5.00 ± 5.00"],
    ]
    assert "paired over seeds: mean ± standard error" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


def test_seeds_are_paired_by_number_not_by_place(comparison: Comparison) -> None:
    """Of three seeds rank lacks the first and fine_tune the last."""
    first, second = comparison.entries[:2]
    three = [replace(run, config={"seed": seed}) for seed, run in enumerate(first.runs, 1)]
    others = [known_run([[x], [x, x]]) for x in (0.1, 0.7, 0.6)]
    others = [replace(run, config={"seed": seed}) for seed, run in enumerate(others)]
    entries = [replace(first, runs=three, seeds=4), replace(second, runs=others, seeds=4)]
    four = replace(comparison, seeds=4, entries=entries)
    # 70 to 85 and 60 to 80
    assert cells(four, entries[1])[-1] == "−17.50 ± 2.50 (2 seeds)"


@pytest.mark.parametrize("seeds", [0, 1])
def test_without_several_seeds_nothing_is_said_of_differences(
    comparison: Comparison, seeds: int
) -> None:
    entries = [replace(each, runs=each.runs[:seeds], seeds=1) for each in comparison.entries]
    one = replace(comparison, seeds=1, entries=entries)
    alone = replace(comparison, entries=comparison.entries[:1])
    for without in (one, alone):
        assert differences_table(without) is None
        texts = as_markdown(without), as_csv(without), as_latex(without)
        assert not any("difference" in text for text in texts)
        assert json.loads(as_json(without))["difference_to"] is None


def test_json_is_what_the_csv_holds(comparison: Comparison) -> None:
    told = json.loads(as_json(comparison))
    rows = list(csv.DictReader(io.StringIO(as_csv(comparison))))
    assert (told["stream"], told["seeds"], told["difference_to"]) == ("p-digits", 2, "rank")
    for method, row in zip(told["methods"], rows, strict=True):
        assert {name: str(value) for name, value in method.items()} == {n: row[n] for n in method}
    paired = [row["difference"] + "/" + row["difference_error"] for row in rows]
    assert paired == ["12.5/2.5", "/", "-5.0/5.0", "/", "/"]
    assert told["methods"][0]["difference_seeds"] == 2


def test_wide_table_fits_80_columns(tmp_path: Path) -> None:
    run = known_run([[0.9912], [0.4912, 0.9012]], parameters=10_454_728, buffer=3_920_000)
    entries = [entry("orthog-subspace", 1, [run, known_run([[0.1], [0.5, 0.4]], seconds=3599)])]
    text = printed(methods_table(Comparison(tmp_path, "s-miniimagenet", 2, entries)))
    assert re.search(r"^ orthog-subspace  \d\d\.\d\d ± \d+\.\d\d ", text, re.M)
    assert "…" not in text


def test_csv_has_results_and_settings(comparison: Comparison) -> None:
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
        "| method | accuracy % | forgetting | parameters | replay buffer | time | "
        "difference to rank |",
        "|---|---:|---:|---:|---:|---:|---:|",
        r"| joint\|all\* | 95.00 ± 0.00 | 0.00 ± 0.00 | 15,000 | 0 | 5.0 s | +12.50 ± 2.50 |",
        "| rank | 82.50 ± 3.54 | 0.00 ± 0.00 | 15,000 | 0 | 5.0 s | – |",
    ]
    assert lines[6] == r"| a\<b\> | failed | – | – | – | – | – |"
    assert "ewc failed: seed 1: task 'b' diverged." in lines
    assert not any(line.startswith("rank failed") for line in lines)


def test_latex(comparison: Comparison) -> None:
    lines = as_latex(comparison).splitlines()
    table = lines[lines.index(r"\begin{tabular}{lrrrrrr}") :]
    assert table == [
        r"\begin{tabular}{lrrrrrr}",
        r"\toprule",
        r"method & accuracy \% & forgetting & parameters & replay buffer & time & "
        r"difference to rank \\",
        r"\midrule",
        r"joint|all* & 95.00 $\pm$ 0.00 & 0.00 $\pm$ 0.00 & 15,000 & 0 & 5.0 s & "
        r"+12.50 $\pm$ 2.50 \\",
        r"rank & 82.50 $\pm$ 3.54 & 0.00 $\pm$ 0.00 & 15,000 & 0 & 5.0 s & -- \\",
        r"fine\_tune & 77.50 $\pm$ 3.54 & 15.00 $\pm$ 7.07 & 15,000 & 0 & 5.0 s & "
        r"$-$5.00 $\pm$ 5.00 \\",
        r"ewc (1 of 2 seeds) & 70.00 & 30.00 & 15,000 & 0 & 5.0 s & -- \\",
        r"a<b> & failed & -- & -- & -- & -- & -- \\",
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


def test_page_holds_all_plots_and_settings(folder: Path, comparison: Comparison) -> None:
    page = Page(write_comparison(comparison, folder / "report.html"))
    words = " ".join(page.words.split())
    assert page.html.startswith("<!doctype html>")
    assert not re.search(r"https?:|url\(|@import|<script", page.html)
    assert page.policy >= {"default-src 'none'", "img-src data:", "base-uri 'none'"}
    beside = {"table.csv", "table.md", "table.tex"}
    assert {link for link in page.references if not link.startswith("data:")} == beside
    assert all((folder / name).exists() for name in beside)
    assert page.tags.count("img") == page.tags.count("source") == 3
    assert {path.name for path in folder.glob("*.png")} == {
        f"{name}{theme}.png"
        for name in ("average", "memory", "matrices")
        for theme in ("", "-dark")
    }
    for row, difference in zip(CELLS, DIFFERENCES, strict=True):
        assert " ".join((*row, difference)) in words
    assert "differences in points of accuracy, paired over seeds: mean ± standard error" in words
    assert "b" not in page.tags
    assert "Of 5 methods, 4 learned 2 tasks of p-digits with 2 seeds or fewer; the best" in words
    assert "the best on average is rank: 82.50 ± 3.54 %, forgetting 0.00 ± 0.00." in words
    own, shared = words.split("Of each method, where they differ")[1].split("Of all methods")
    assert "rank lr 0.01" in own
    assert "ewc strength 5.0 lr 0.1" in own or "ewc lr 0.1 strength 5.0" in own
    assert "epochs" not in own
    assert "epochs 7" in shared
    assert "lr" not in shared.split()
    assert "width 256" in shared


def test_page_does_not_overwrite_the_comparison(folder: Path, comparison: Comparison) -> None:
    before = sorted(folder.iterdir())
    with pytest.raises(RankupError, match=r"name ends in \.html, got .*compare\.json$"):
        write_comparison(comparison, folder / "compare.json")
    assert sorted(folder.iterdir()) == before
    assert len(read_comparison(folder).entries) == len(ROWS)


def tables_of(page: Page) -> list[str]:
    """Where its links lead."""
    return [unquote(link) for link in page.references if not link.startswith("data:")]


def test_page_elsewhere_has_own_tables(
    folder: Path, comparison: Comparison, tmp_path: Path
) -> None:
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "table.csv").write_text("mine")
    one = replace(comparison, entries=comparison.entries[:1])
    for name, shown in (("a", comparison), ("b", one), ("report", one)):
        page = Page(write_comparison(shown, pages / f"{name}.html"))
        assert tables_of(page) == [f"{name}.csv", f"{name}.md", f"{name}.tex"]
        assert f"{name}.csv" in page.words
    assert (pages / "a.csv").read_text() == as_csv(comparison)
    assert (pages / "b.md").read_text() == as_markdown(one)
    assert (pages / "table.csv").read_text() == "mine"
    assert not (pages / "table.md").exists()
    own = Page(write_comparison(comparison, pages / ".." / folder.name / "report.html"))
    assert tables_of(own) == ["table.csv", "table.md", "table.tex"]


@pytest.mark.parametrize("name", ["a: 50%#1?", "a.b", "é&<b>"])
def test_links_lead_to_tables_of_odd_names(
    comparison: Comparison, tmp_path: Path, name: str
) -> None:
    page = write_comparison(comparison, tmp_path / f"{name}.html")
    links = [link for link in Page(page).references if not link.startswith("data:")]
    assert not re.search("[:#?]", "".join(links))
    tables = [tmp_path / unquote(link) for link in links]
    assert tables == [tmp_path / f"{name}.{suffix}" for suffix in ("csv", "md", "tex")]
    assert all(path.exists() for path in tables)


def test_comparison_is_shown_alone(folder: Path, tmp_path: Path, call: Call) -> None:
    run = write_run(tmp_path / "run", [[0.5]])
    for both in ((folder, run), (run, folder)):
        done = call("report", *both, "--out", tmp_path / "page.html")
        assert (done.code, done.out) == (1, "")
        assert done.err == f"rankup: {folder} is a comparison, which can only be shown alone\n"
    assert not (tmp_path / "page.html").exists()

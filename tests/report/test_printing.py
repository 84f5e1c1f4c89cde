"""Tables and notes in a narrow terminal: nothing is missing, and no word is broken."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from helpers.calling import Call
from helpers.comparisons import entry, known_run
from helpers.experiments import result, tiny
from helpers.reports import constant, named, write_run
from rankup.paper import tables
from rankup.paper.render import show_parts
from rankup.paper.results import Results
from rankup.report.comparison.text import methods_table
from rankup.report.tables import comparison_table, print_table, run_table
from rankup.runs.comparison import Comparison

NAMES = ["multitask", "rank, seeded, width 32, 60 epochs", "ewc"]


def of_methods() -> Table:
    runs = [known_run([[0.9912], [0.4912, 0.9012]], parameters=10_454_728, buffer=3_920_000)] * 2
    entries = [entry(name, number, runs) for number, name in enumerate(NAMES, 1)]
    return methods_table(Comparison(Path(), "p-digits", 2, entries))


def of_runs() -> Table:
    return comparison_table([named(method=name, seed=n) for n in (0, 1) for name in NAMES])


def of_a_run() -> Table:
    run = named()
    run.lines = [{**run.lines[0], "task": name} for name in NAMES]
    run.matrix.rows[:] = constant(3)
    return run_table(run)


def of_the_paper(results: Results) -> tables.Table:
    cells = [tiny(epochs=number) for number in (1, 2, 3)]
    learned = [[0.9], [0.8, 0.9]]
    for own in cells:
        results.add(own, [result(n, learned, parameters=21_938_900.0) for n in (0, 1)])
    rows = [tables.Row(*each, (46.4, 16.0, None)) for each in zip(NAMES, cells, strict=True)]
    measures = ("accuracy", "forgetting", "parameters")
    note = "A note that is longer than the terminal is wide, of words that are all to be read. " * 2
    return tables.Table("A table", [tables.Section("digits", measures, rows)], note.strip())


def printed(table: Table, width: int) -> str:
    file = io.StringIO()
    print_table(Console(width=width, file=file, color_system=None), table)
    return file.getvalue()


def words(text: str) -> list[str]:
    return sorted(re.findall(r"[^\s─]+", text))


@pytest.mark.parametrize("width", [20, 40, 50, 60, 80])
@pytest.mark.parametrize("table", [of_methods, of_runs, of_a_run])
def test_table_keeps_its_words_in_any_width(table: Callable[[], Table], width: int) -> None:
    whole = printed(table(), 300)
    text = printed(table(), width)
    assert words(text) == words(whole)
    if width >= 80:
        assert max(map(len, text.splitlines())) <= width


def test_headings_are_folded_before_names() -> None:
    table = Table(box=None)
    table.add_column("task", overflow="fold")
    table.add_column("task guessed %")
    table.add_row("split 01", "54.29")
    wide, narrow = (printed(table, width).splitlines() for width in (80, 20))
    assert [line.split() for line in wide] == [
        ["task", "task", "guessed", "%"],
        ["split", "01", "54.29"],
    ]
    assert [line.split() for line in narrow] == [
        ["task"],
        ["task", "guessed", "%"],
        ["split", "01", "54.29"],
    ]


def test_too_wide_table_has_a_line_per_row() -> None:
    lines = [line.rstrip() for line in printed(of_methods(), 40).splitlines()]
    for name in NAMES:
        assert re.search(rf"^ {name} +\S+ ± .* 1\.0 s$", "\n".join(lines), re.M)
    caption = lines[1 + [line.split()[0] for line in lines].index("ewc") :]
    assert caption[0].startswith("mean ± standard deviation")
    assert max(map(len, caption)) <= 40


def test_blank_edge_goes_first(tmp_path: Path) -> None:
    (shown,) = tables.rich_tables(of_the_paper(Results(tmp_path)), Results(tmp_path))
    text = printed(shown, 79)
    assert re.search(r"^multitask +85\.00 ± 0\.00 .* 21,938,900$", text, re.M)
    assert max(map(len, text.splitlines())) == 79
    assert re.search(r"^width 32,  *\n60 epochs", text, re.M)


def test_note_is_wrapped_only_in_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = Results(tmp_path)
    part = of_the_paper(results)
    monkeypatch.setenv("COLUMNS", "60")
    show_parts({"table": part}, results)
    assert part.differs in capsys.readouterr().out.splitlines()
    monkeypatch.setenv("FORCE_COLOR", "1")
    show_parts({"table": part}, results)
    text = capsys.readouterr().out
    *_, first, second, third = (line.rstrip() for line in text.splitlines())
    assert max(map(len, (first, second, third))) <= 60
    assert " ".join((first, second, third)) == part.differs
    assert "rank, seeded, width 32, 60 epochs" in text


@pytest.mark.parametrize("of", ["runs", "a comparison"])
def test_report_is_whole_in_a_narrow_terminal(
    of: str, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    runs = [
        write_run(tmp_path / "c" / method / "seed-0", constant(2), method=method)
        for method in ("rank", "multitask")
    ]
    index = {"asked": {"stream": "p-digits"}, "seeds": [0], "failed": {}}
    index["methods"] = {"rank": True, "multitask": True}
    (tmp_path / "c" / "compare.json").write_text(json.dumps(index))
    shown = runs if of == "runs" else [tmp_path / "c"]
    done = call("report", *shown, "--out", tmp_path / "page.html")
    assert done.code == 0, done.err
    for method in ("rank", "multitask"):
        assert re.search(rf"^ *{method} +96\.95 +0\.00 +15,000 +0 +5\.0 s *$", done.out, re.M)

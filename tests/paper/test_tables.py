"""The paper's tables and figures: what they ask for, how they are shown, and the command that runs
them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.experiments import result, tiny
from rankup import paper
from rankup.cli.main import app
from rankup.errors import RankupError
from rankup.methods import METHODS, method_options
from rankup.paper import (
    PARTS,
    mlp,
    paper_values,
    part,
    plots,
)
from rankup.paper.experiment import Experiment
from rankup.paper.plots import Figure
from rankup.paper.render import show_parts, write_page
from rankup.paper.results import Results
from rankup.paper.tables import Row, Section, Table, Tasks, lines, markdown
from rankup.runs.request import Device


@pytest.mark.parametrize("name", PARTS)
def test_every_experiment_can_be_requested(name: str) -> None:
    experiments = part(name).experiments()
    assert len({experiment.folder() for experiment in experiments}) == len(experiments) > 0
    for experiment in experiments:
        assert experiment.stream in {*paper_values.STREAMS, "s-mnist"}
        asked = experiment.request(Device.cpu, None)
        assert (asked.stream, asked.seeds) == (experiment.stream, experiment.seeds)
        method_options(experiment.method, experiment.options())


def test_table_has_all_methods_with_equal_epochs() -> None:
    table = part("accuracy")
    assert isinstance(table, Table)
    for section in table.sections:
        assert {row.experiment.method for row in section.rows} == set(METHODS)
        rivals = [row.experiment for row in section.rows if row.experiment.method != "rank"]
        assert len({dict(experiment.settings)["epochs"] for experiment in rivals}) == 1


def test_paper_values_are_in_the_right_rows() -> None:
    table = part("accuracy")
    assert isinstance(table, Table)
    rows = {section.title: {row.name: row for row in section.rows} for section in table.sections}
    assert rows["R-MNIST"]["orthog"].paper_values[0] == 80.2
    assert rows["S-miniImageNet"]["nscl"].paper_values[0] == 47.32
    assert rows["P-MNIST"]["nscl"].paper_values[0] is None
    assert rows["P-MNIST"]["multitask"].paper_values[0] == 96.8
    assert rows["S-CIFAR100"]["multitask"].paper_values[0] is None
    assert rows["S-CIFAR100"]["multitask, one head"].paper_values[0] == 16.4


def test_folder_depends_on_settings_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = Experiment.of("p-mnist", "ewc", epochs=5)
    assert one.folder() == Experiment.of("p-mnist", "ewc", epochs=5, seeds=2).folder()
    others = [
        Experiment.of("r-mnist", "ewc", epochs=5),
        Experiment.of("p-mnist", "finetune", epochs=5),
        Experiment.of("p-mnist", "ewc", epochs=6),
        Experiment.of("p-mnist", "ewc", epochs=5, strength=3.0),
        Experiment.of("p-mnist", "ewc", epochs=5, width=64),
        Experiment.of("p-mnist", "ewc", epochs=5, recipe="paper"),
    ]
    assert len({experiment.folder() for experiment in [one, *others]}) == 7
    # A method's tuned settings are part of it.
    before = one.folder()
    folder = tmp_path / "p-mnist-mlp"
    folder.mkdir()
    (folder / "ewc.json").write_text(json.dumps({"chosen": {"strength": 7.0}}))
    monkeypatch.setattr("rankup.methods.settings.TUNED", tmp_path)
    assert one.folder() != before
    assert one.known()["settings"] == {"strength": 7.0, "epochs": 5}


def test_wrong_setting_is_refused_at_once() -> None:
    with pytest.raises(RankupError, match="epochs must be at least 1"):
        Experiment.of("p-mnist", epochs=0)


def test_row_can_show_fewer_seeds(results: Results) -> None:
    experiment = tiny(seeds=3)
    results.add(experiment, [result(seed, [[0.5], [0.5, 0.5 + 0.1 * seed]]) for seed in range(3)])
    rows = [Row("all", experiment, (None,)), Row("two", experiment, (None,), seeds=2)]
    _, *shown = lines(Section("", ("accuracy",), rows), results)
    assert shown == [["all", "55.00 ± 5.00"], ["two", "52.50 ± 3.54"]]


def test_ablation_compares_the_same_seeds() -> None:
    table = part("ablation")
    assert isinstance(table, Table)
    assert {row.shown.seeds for section in table.sections for row in section.rows} == {2}


def test_surplus_seeds_do_not_count(results: Results) -> None:
    results.add(tiny(), [result(seed, [[seed / 10]]) for seed in (2, 0)])
    results.add(tiny(), [result(1, [[0.1]])])
    few, all_ = results.of(tiny(seeds=2)), results.of(tiny(seeds=5))
    assert few is not None
    assert all_ is not None
    assert [run.seed for run in few.runs] == [0, 1]
    assert [run.seed for run in all_.runs] == [0, 1, 2]
    assert results.missing(tiny(seeds=5)) == [3, 4]


def test_damaged_results_file_is_named(results: Results) -> None:
    path = results.path(tiny())
    path.parent.mkdir(parents=True)
    for text in ("{", "[]", '{"runs": [{"seed": 0}]}'):
        path.write_text(text)
        with pytest.raises(RankupError, match=f"{path.name} is not a results file"):
            results.of(tiny())


def test_table_shows_ours_paper_and_difference(results: Results) -> None:
    one, other = tiny(), tiny("finetune")
    results.add(one, [result(0, [[0.9], [0.8, 0.9]]), result(1, [[0.9], [0.9, 0.9]])])
    rows = [
        Row("ours", one, (80.0, 0.001)),
        Row("theirs", other, (70.0, None)),
    ]
    section = Section("digits", ("accuracy", "parameters"), rows)
    assert list(lines(section, results)) == [
        ["digits", "accuracy %", "paper", "diff", "parameters", "paper", "diff"],
        ["ours", "87.50 ± 3.54", "80", "+7.50", "1,000", "0.001M", "+0.00M"],
        ["theirs", "not run", "70", "–", "not run", "–", "–"],
    ]
    results.path(one).unlink()
    results.add(one, [result(0, [[0.9], [0.8, 0.9]])])
    assert list(lines(section, results))[1][:2] == ["ours (1 of 2 seeds)", "85.00"]
    _, rule, ours, theirs = markdown(
        Table("t", [section]), results, results.root.parent / "docs" / "page.md"
    ).splitlines()
    assert rule == "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    assert ours.startswith(f"| [ours](../results/{one.folder()}.json) (1 of 2 seeds) | 85.00 |")
    assert theirs.startswith("| theirs | not run |")


def test_table_can_show_some_tasks_alone(results: Results) -> None:
    learned = [[0.1], [0.2, 0.8], [0.3, 0.9, 0.7]]
    results.add(tiny(), [result(0, learned), result(1, learned)])
    section = Section("digits", (Tasks(2, 3),), [Row("ours", tiny(), [70.0])])
    assert list(lines(section, results)) == [
        ["digits", "tasks 2–3", "paper", "diff"],
        ["ours", "80.00 ± 0.00", "70", "+10.00"],
    ]


def test_figure_shows_what_was_run(results: Results, tmp_path: Path) -> None:
    figure = plots.figure_transition()
    assert figure.write("f", results, tmp_path / "none") == []
    assert not (tmp_path / "none").exists()
    experiments = figure.panels["p-mnist"]
    results.add(experiments["EWC"], [result(0, [[0.9], [0.7, 0.9]])])
    results.add(experiments["rank update"], [result(0, [[0.9], [0.9, 0.9]])])
    assert figure.write("f", results, tmp_path) == ["f-p-mnist"]
    averages = plots.figure_accuracy()
    assert averages.write("a", results, tmp_path) == ["a-p-mnist"]
    for name in ("f-p-mnist", "a-p-mnist"):
        for ending in ("", "-dark"):
            assert (tmp_path / f"{name}{ending}.png").stat().st_size > 1000


@pytest.fixture
def little_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A paper of one table and one figure."""

    def table() -> Table:
        rows = [Row("ours", tiny(), (50.0,)), Row("theirs", tiny("finetune"), (60.0,))]
        return Table("A table", [Section("digits", ("accuracy",), rows)], "It differs.")

    def figure() -> Figure:
        return Figure("A figure", {"p-mnist": {"ours": tiny()}}, plots._averages)

    monkeypatch.setattr(mlp, "accuracy", table)
    monkeypatch.setattr(plots, "figure_accuracy", figure)
    shown = {name: PARTS[name] for name in ("accuracy", "figure-accuracy")}
    monkeypatch.setattr(paper, "PARTS", shown)
    monkeypatch.setattr("rankup.cli.paper.PARTS", shown)
    monkeypatch.setattr("rankup.paper.overview.PARTS", shown)


def asked(*words: str) -> str:
    answer = CliRunner().invoke(app, ["paper", *words], env={"COLUMNS": "80"})
    if answer.exception and not isinstance(answer.exception, SystemExit):
        raise answer.exception
    return answer.output


@pytest.mark.usefixtures("one_process")
def test_command_runs_what_is_left_and_writes_a_page(little_paper: None, tmp_path: Path) -> None:
    where = ["--results", str(tmp_path / "r"), "--device", "cpu"]
    assert "accuracy" in asked(*where)
    nothing = asked("accuracy", *where, "--minutes", "0")
    assert "2 left to run" in nothing
    assert nothing.count("not run") == 2
    first = asked("accuracy", *where, "--only", "finetune")
    assert "p-digits, finetune, width 16, tasks 2, epochs 2: accuracy" in first
    assert first.count("not run") == 1
    again = asked("accuracy", *where, "--only", "finetune", "--only", "rank", "--minutes", "0")
    assert "1 left to run" in again
    page = tmp_path / "docs" / "results.md"
    last = asked("all", *where, "--page", str(page))
    assert "finetune, width" not in last
    assert "not run" not in last
    assert "It differs." in last
    text = page.read_text()
    assert "## A table" in text
    assert "results/figure-accuracy-p-mnist.png" in text
    assert (page.parent / "results" / "figure-accuracy-p-mnist-dark.png").exists()
    shown = asked("accuracy", *where, "--show")
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_page_has_no_table_of_which_nothing_was_run(results: Results, tmp_path: Path) -> None:
    run = replace(result(0, [[0.9]]), config={"versions": {"torch": "2.8"}})
    results.add(tiny(), [run])
    rows = [Row("ours", tiny(), (None,)), Row("theirs", tiny("finetune"), (None,))]
    begun, new = (
        Table(title, [Section("digits", ("accuracy",), some)], "It differs.")
        for title, some in (("Begun", rows), ("New", rows[1:]))
    )
    write_page({"begun": begun, "new": new}, results, tmp_path / "page.md")
    before, after = (tmp_path / "page.md").read_text().split("## New")
    assert "| theirs | not run |" in before
    assert after == "\n\n`rankup paper new`\n\nNothing of it has been run.\n"


def test_protocol_names_who_was_not_tuned() -> None:
    untuned = mlp.PROTOCOL.partition("they have their defaults: ")[2]
    assert "wsn" in untuned
    assert "packnet" not in untuned


def test_missing_data_is_said_once(tmp_path: Path) -> None:
    given = ["--data", str(tmp_path), "--results", str(tmp_path / "r"), "--device", "cpu"]
    said = asked("rank", *given, "--only", "rank 11,4")
    assert said.count("mnist is not in") == 1
    assert said.count("failed for the same reason") == 2


@pytest.mark.parametrize("page", ["file.md", "file/page.md"])
def test_unwritable_page_is_said(page: str, results: Results, tmp_path: Path) -> None:
    figure = plots.figure_transition()
    run = replace(result(0, [[0.9], [0.7, 0.9]]), config={"versions": {"torch": "2.8"}})
    results.add(figure.panels["p-mnist"]["EWC"], [run])
    (tmp_path / "file").touch()  # where the pictures' folder would be
    with pytest.raises(RankupError, match="file.* cannot be written: "):
        write_page({"figure-transition": figure}, results, tmp_path / page)
    assert not list(tmp_path.glob("*.md"))


def test_tables_are_shown_without_pictures(
    results: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = plots.figure_transition()
    results.add(figure.panels["p-mnist"]["EWC"], [result(0, [[0.9], [0.7, 0.9]])])
    (results.root / "figures").touch()
    show_parts({"figure-transition": figure, "rank": part("rank")}, results)
    said = capsys.readouterr()
    assert "figures cannot be written: " in said.err
    assert "P-MNIST" in said.out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["nothing"], "there is no table or figure 'nothing', only accuracy"),
        (["rank", "--only", "imagenet"], "nothing in rank has 'imagenet' in its description"),
        (["rank", "--only", "p-mnist", "--only", "imagenet"], "nothing in rank has 'imagenet'"),
        (["rank", "--share", "5/4"], "a share is written like 1/4"),
        (["rank", "--device", "cpu", "--jobs", "2"], "--jobs is for a GPU"),
    ],
)
def test_wrong_words_are_refused(words: list[str], why: str, tmp_path: Path) -> None:
    with pytest.raises(RankupError, match=why):
        asked(*words, "--results", str(tmp_path))

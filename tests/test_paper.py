"""The paper's tables and figures: what they ask for, that nothing is run twice, and how they are
shown."""

import json
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rankup import paper
from rankup.cli import app
from rankup.cli_options import Device
from rankup.errors import RankupError
from rankup.launch import share_queues
from rankup.methods import METHODS, method_options
from rankup.paper import PARTS, mlp, part, plots, printed
from rankup.paper.cells import Cell, cell
from rankup.paper.pieces import pieces_in
from rankup.paper.plots import Figure
from rankup.paper.results import Result, Results
from rankup.paper.running import WORK, Runner, Said, phases, share
from rankup.paper.showing import write_page
from rankup.paper.tables import Row, Section, Table, Tasks, lines, markdown

TINY = {"tasks": 2, "epochs": 2, "width": 16, "seeds": 2}


def tiny(method: str = "rank", **given: object) -> Cell:
    return cell("p-digits", method, **{**TINY, **given})


def result(seed: int, accuracy: Sequence[Sequence[float]], **given: object) -> Result:
    rest = {"parameters": 1000.0, "buffer": 0.0, "seconds": 3.0, **given}
    about = {"config": {}, "date": "", "machine": "", "command": ""}
    return Result(seed=seed, accuracy=[list(row) for row in accuracy], **about, **rest)


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "results")


def runner(results: Results) -> Runner:
    return Runner(results, Device.cpu, None, "rankup paper")


@pytest.mark.parametrize("name", PARTS)
def test_every_cell_is_a_run_that_can_be_asked_for(name: str) -> None:
    cells = part(name).cells()
    assert len({own.folder() for own in cells}) == len(cells) > 0
    for own in cells:
        assert own.stream in printed.STREAMS
        asked = own.request(Device.cpu, None)
        assert (asked.stream, asked.seeds) == (own.stream, own.seeds)
        method_options(own.method, own.options())


def test_tables_name_all_methods_and_no_other_epochs_for_rivals() -> None:
    table = part("accuracy")
    assert isinstance(table, Table)
    for section in table.sections:
        assert {row.cell.method for row in section.rows} == set(METHODS)
        rivals = [row.cell for row in section.rows if row.cell.method != "rank"]
        assert len({dict(own.settings)["epochs"] for own in rivals}) == 1


def test_the_papers_figures_are_where_they_belong() -> None:
    table = part("accuracy")
    assert isinstance(table, Table)
    rows = {section.title: {row.name: row for row in section.rows} for section in table.sections}
    assert rows["R-MNIST"]["orthog"].printed[0] == 80.2
    assert rows["S-miniImageNet"]["nscl"].printed[0] == 47.32
    assert rows["P-MNIST"]["nscl"].printed[0] is None
    assert rows["P-MNIST"]["multitask"].printed[0] == 96.8
    assert rows["S-CIFAR100"]["multitask"].printed[0] is None
    assert rows["S-CIFAR100"]["multitask, one head"].printed[0] == 16.4


def test_runs_that_differ_have_other_names_and_the_same_runs_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = cell("p-mnist", "ewc", epochs=5)
    assert one.folder() == cell("p-mnist", "ewc", epochs=5, seeds=2).folder()
    others = [
        cell("r-mnist", "ewc", epochs=5),
        cell("p-mnist", "finetune", epochs=5),
        cell("p-mnist", "ewc", epochs=6),
        cell("p-mnist", "ewc", epochs=5, strength=3.0),
        cell("p-mnist", "ewc", epochs=5, width=64),
        cell("p-mnist", "ewc", epochs=5, recipe="paper"),
    ]
    assert len({own.folder() for own in [one, *others]}) == 7
    # What a method is tuned to is a part of it.
    before = one.folder()
    folder = tmp_path / "p-mnist-mlp"
    folder.mkdir()
    (folder / "ewc.json").write_text(json.dumps({"chosen": {"strength": 7.0}}))
    monkeypatch.setattr("rankup.settings.TUNED", tmp_path)
    assert one.folder() != before
    assert one.known()["settings"] == {"strength": 7.0, "epochs": 5}


def test_what_is_no_setting_is_refused_at_once() -> None:
    with pytest.raises(RankupError, match="epochs must be at least 1"):
        cell("p-mnist", epochs=0)


def test_a_cell_is_run_once_and_leaves_nothing_else_behind(results: Results) -> None:
    own, runs = tiny(), runner(results)
    assert results.of(own) is None
    assert runs.left([own]) == [own]
    assert runs.run(own, None, pytest.fail) == ""
    measured = results.of(own)
    assert measured is not None
    assert [run.seed for run in measured.runs] == [0, 1]
    assert len(measured.accuracy) == 2
    assert measured.forgetting == [0, 0]
    assert measured.matrix.shape == (2, 2)
    assert measured.averages.shape == (2, 2)
    assert measured.runs[0].config["recipe"]["epochs"] == 2
    assert json.loads(results.path(own).read_bytes())["known"] == own.known()
    assert runs.left([own]) == []
    assert not list((results.root / WORK).rglob("*.jsonl"))


def test_only_seeds_that_are_missing_are_run(results: Results) -> None:
    own, runs = tiny(seeds=3), runner(results)
    results.add(own, [result(1, [[0.5], [0.5, 0.5]])])
    assert results.missing(own) == [0, 2]
    runs.run(own, None, pytest.fail)
    measured = results.of(own)
    assert measured is not None
    assert [run.seed for run in measured.runs] == [0, 1, 2]
    assert measured.accuracy[1] == 0.5


def test_a_run_that_was_stopped_goes_on(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    own, runs = tiny(seeds=1), runner(results)

    def stop(now: object) -> None:
        if now.task == 1:  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    monkeypatch.setattr("rankup.run._TELL", 0.0)
    with pytest.raises(KeyboardInterrupt):
        runs.run(own, stop, pytest.fail)
    assert results.missing(own) == [0]
    learned: list[int] = []
    runs.run(own, lambda now: learned.append(now.task), pytest.fail)
    assert set(learned) == {1}
    assert results.missing(own) == []


def test_a_run_that_fails_is_marked_and_not_run_again(results: Results) -> None:
    own, runs = tiny(lr=1e6, seeds=1), runner(results)
    assert "diverged" in runs.run(own, None, lambda _: None)
    assert results.of(own) is None
    (why,) = results.failures(own)
    assert "diverged" in why
    assert runs.left([own]) == []
    table = Section("s", ("accuracy",), [Row("ours", own, (None,))])
    assert list(lines(table, results)) == [["s", "accuracy %"], ["ours", "failed"]]


def test_what_was_refused_or_found_no_memory_is_tried_again(
    results: Results, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs = Runner(results, Device.cpu, tmp_path, "rankup paper")
    refused = cell("p-mnist", epochs=1, seeds=1)
    assert "mnist" in runs.run(refused, None, pytest.fail)
    assert runs.left([refused]) == [refused]

    def full(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("rankup.paper.running.run_seeds", full)
    assert runs.run(tiny(), None, pytest.fail) == "there is too little memory for it"
    assert runs.left([tiny()]) == [tiny()]


def test_several_are_run_at_once_and_come_to_the_same(results: Results, tmp_path: Path) -> None:
    cells = [tiny(seeds=1), tiny("finetune", seeds=1), tiny("ewc", seeds=1, lr=1e6)]
    said: list[Said] = []
    ended = {each.cell: each for each in runner(results).run_all(cells, said.append, jobs=2)}
    assert set(ended) == set(cells)
    assert [bool(ended[own].failed) for own in cells] == [False, False, True]
    assert {each.cell for each in said} == set(cells)
    alone = Results(tmp_path / "alone")
    for own in cells[:2]:
        runner(alone).run(own, None, pytest.fail)
        one, other = results.of(own), alone.of(own)
        assert one is not None
        assert other is not None
        assert one.runs[0].accuracy == other.runs[0].accuracy
    assert not list(runner(results).run_all(cells, pytest.fail, jobs=2, minutes=0))


def test_large_networks_are_run_few_at_once_and_of_all_long_ones_first() -> None:
    small = [tiny(epochs=epochs) for epochs in (3, 50, 4)]
    resnet = [tiny(epochs=epochs, net="resnet18") for epochs in (20, 80)]
    wide = [replace(tiny(epochs=7), stream="s-miniimagenet")]
    found = phases([*small, *resnet, *wide], jobs=8)
    epochs = [(jobs, [own.epochs for own in some]) for jobs, some in found]
    assert epochs == [(2, [80, 20]), (2, [7]), (8, [50, 4, 3])]
    assert [jobs for jobs, _ in phases([*small, *resnet], jobs=3)] == [1, 3]
    ((_, order),) = phases([tiny(epochs=9, seeds=2), tiny(epochs=5, seeds=5)], jobs=2)
    assert [own.seeds for own in order] == [5, 2]


def test_shares_are_all_cells_and_each_once() -> None:
    cells = part("accuracy").cells()
    parts = [own for number in (1, 2, 3) for own in share(cells, f"{number}/3")]
    assert sorted(map(str, parts)) == sorted(map(str, cells))
    assert len(parts) == len(cells)
    for wrong in ("0/3", "4/3", "3", "a/b"):
        with pytest.raises(RankupError, match="a share is written as 1/4"):
            share(cells, wrong)


def test_a_table_shows_ours_the_papers_and_the_difference(results: Results) -> None:
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


def test_a_table_can_show_some_tasks_alone(results: Results) -> None:
    learned = [[0.1], [0.2, 0.8], [0.3, 0.9, 0.7]]
    results.add(tiny(), [result(0, learned), result(1, learned)])
    section = Section("digits", (Tasks(2, 3),), [Row("ours", tiny(), [70.0])])
    assert list(lines(section, results)) == [
        ["digits", "tasks 2–3", "paper", "diff"],
        ["ours", "80.00 ± 0.00", "70", "+10.00"],
    ]


def test_a_file_that_is_no_result_is_named(results: Results) -> None:
    path = results.path(tiny())
    path.parent.mkdir(parents=True)
    for text in ("{", "[]", '{"runs": [{"seed": 0}]}'):
        path.write_text(text)
        with pytest.raises(RankupError, match=f"{path.name} is no file of results"):
            results.of(tiny())


def test_more_seeds_than_are_asked_for_do_not_count(results: Results) -> None:
    results.add(tiny(), [result(seed, [[seed / 10]]) for seed in (2, 0)])
    results.add(tiny(), [result(1, [[0.1]])])
    few, all_ = results.of(tiny(seeds=2)), results.of(tiny(seeds=5))
    assert few is not None
    assert all_ is not None
    assert [run.seed for run in few.runs] == [0, 1]
    assert [run.seed for run in all_.runs] == [0, 1, 2]
    assert results.missing(tiny(seeds=5)) == [3, 4]


def test_a_figure_shows_what_was_run(results: Results, tmp_path: Path) -> None:
    figure = plots.figure_transition()
    assert figure.write("f", results, tmp_path / "none") == []
    assert not (tmp_path / "none").exists()
    cells = figure.panels["p-mnist"]
    results.add(cells["EWC"], [result(0, [[0.9], [0.7, 0.9]])])
    results.add(cells["rank update"], [result(0, [[0.9], [0.9, 0.9]])])
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
    monkeypatch.setattr("rankup.cli_paper.PARTS", shown)
    monkeypatch.setattr("rankup.paper.overview.PARTS", shown)


def asked(*words: str) -> str:
    answer = CliRunner().invoke(app, ["paper", *words], env={"COLUMNS": "80"})
    if answer.exception and not isinstance(answer.exception, SystemExit):
        raise answer.exception
    return answer.output


def test_the_command_runs_what_is_left_shows_it_and_writes_a_page(
    little_paper: None, tmp_path: Path
) -> None:
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


def test_what_all_settings_lack_is_said_once(tmp_path: Path) -> None:
    given = ["--data", str(tmp_path), "--results", str(tmp_path / "r"), "--device", "cpu"]
    said = asked("rank", *given)
    assert said.count("mnist is not in") == 1
    assert said.count("failed as well") == len(part("rank").cells()) - 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["nothing"], "there is no table or figure 'nothing', only accuracy"),
        (["rank", "--only", "imagenet"], "nothing of rank has 'imagenet' in its description"),
        (["rank", "--only", "p-mnist", "--only", "imagenet"], "nothing of rank has 'imagenet'"),
        (["rank", "--share", "5/4"], "a share is written as 1/4"),
        (["rank", "--device", "cpu", "--jobs", "2"], "--jobs is for a GPU"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(words: list[str], why: str, tmp_path: Path) -> None:
    with pytest.raises(RankupError, match=why):
        asked(*words, "--results", str(tmp_path))


def test_pieces_say_how_long_one_waited(results: Results, tmp_path: Path) -> None:
    cells, page = [tiny(seeds=1), tiny("finetune", seeds=1)], tmp_path / "page.md"
    rows = [Row(own.method, own, [None]) for own in cells]
    table = Table("A table", [Section("digits", ("accuracy",), rows)])
    for own in cells:
        assert [ended.failed for ended in runner(results).run_all([own], lambda _: None)] == [""]
        write_page({"accuracy": table}, results, page)
        is_whole = "All 2 settings took 0 min on one " in page.read_text()
        assert is_whole == (own == cells[1])
    first, second = pieces_in(results.root)
    assert first.cells == [str(cells[0].folder())]
    assert second.cells == [str(cells[1].folder())]
    assert min(first.seconds, second.seconds) > 0
    assert not list(runner(results).run_all([], lambda _: None))  # nothing to wait for
    assert len(pieces_in(results.root)) == 2


def test_a_piece_that_was_stopped_counts_with_what_it_finished(results: Results) -> None:
    cells = [tiny("finetune", seeds=1), tiny(seeds=1)]
    with closing(runner(results).run_all(cells, lambda _: None)) as ended:
        next(ended)
    (own,) = pieces_in(results.root)
    assert own.cells == [str(cells[0].folder())]


def test_where_nothing_can_be_written_nothing_is_run(tmp_path: Path) -> None:
    (tmp_path / "pieces").write_text("a file")
    said: list[Said] = []
    with pytest.raises(RankupError, match=r"pieces/.*\.json cannot be written: "):
        list(runner(Results(tmp_path)).run_all([tiny()], said.append))
    assert not said


def test_a_file_that_is_no_piece_is_named(results: Results) -> None:
    path = results.root / "pieces" / "broken.json"
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    with pytest.raises(RankupError, match=r"broken\.json does not say how long a piece took"):
        pieces_in(results.root)


def test_a_taught_cell_learns_from_its_teachers_networks(results: Results) -> None:
    teacher = tiny(seeds=1, rank="0,0", seeded="64", epochs=8)
    pupil, alone = tiny(seeds=1, teacher=teacher), tiny(seeds=1)
    assert pupil.folder() not in (teacher.folder(), alone.folder())
    assert "taught" in str(pupil)
    # Whatever comes first, teachers do; and what they know is kept until it is not needed.
    ended = [own.cell for own in runner(results).run_all([pupil, teacher, alone], lambda _: None)]
    assert ended == [teacher, alone, pupil]
    assert not list((results.root / WORK).rglob("net"))
    found = [results.of(own) for own in (teacher, alone, pupil)]
    assert all(found)
    assert found[1].runs[0].accuracy != found[2].runs[0].accuracy  # type: ignore[union-attr]
    told = found[2].runs[0].config["options"]["teacher"]  # type: ignore[union-attr]
    assert told == str(teacher.folder())


def test_a_taught_cell_alone_has_its_teacher_learn_first(results: Results) -> None:
    teacher = tiny(seeds=1, epochs=8)
    pupil = tiny(seeds=1, epochs=1, teacher=teacher)
    assert runner(results).run(pupil, None, pytest.fail) == ""
    assert results.of(teacher) is not None
    again = results.path(teacher).read_bytes()
    other = tiny(seeds=1, epochs=2, teacher=teacher)  # has to learn once more what was forgotten
    assert runner(results).run(other, None, pytest.fail) == ""
    assert results.path(teacher).read_bytes() == again
    assert not list((results.root / WORK).rglob("net"))


def test_a_pupil_of_a_teacher_that_failed_is_not_run(results: Results) -> None:
    teacher = tiny(seeds=1, lr=1e9)
    pupil = tiny(seeds=1, teacher=teacher)
    assert "its teacher failed" in runner(results).run(pupil, None, pytest.fail)
    assert results.missing(pupil) == [0]
    assert results.failures(teacher)


def test_what_is_taught_comes_after_all_teachers() -> None:
    teacher = cell("p-mnist", epochs=5)
    cells = [cell("s-cifar100", net="resnet18", epochs=1, teacher=teacher), teacher]
    assert [some for _, some in phases(cells, 4)] == [[teacher], [cells[0]]]


@pytest.mark.parametrize(("processes", "queues"), [(1, "32"), (3, "32"), (12, "8"), (200, "1")])
def test_processes_share_the_queues_of_a_gpu(
    processes: int, queues: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")  # and after the test what it was before
    del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
    share_queues(processes)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == queues
    share_queues(1)  # as a run in that process does after it
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == queues

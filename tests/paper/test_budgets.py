"""Equal budgets: who takes part, how settings are chosen, what the table and the figure say."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.experiments import result
from rankup import paper
from rankup.cli.main import app
from rankup.methods import METHODS
from rankup.methods.info import Values, axis
from rankup.methods.search import TRIALS
from rankup.paper import budgets, part
from rankup.paper.budgets import BUDGETS, Budget, Contender, best_of, contenders, equal_budgets
from rankup.paper.estimates import Left, Minutes, left_of, main_machine, pace_on
from rankup.paper.experiment import Experiment
from rankup.paper.front import figure_front, front
from rankup.paper.results import Results
from rankup.paper.tables import Section, lines
from rankup.runs.request import Device

TINY = Budget("p-digits", "mlp", 16, 2, "8,4", seeds=2, tasks=2)
RATES = axis("lr", 0.01, 0.02)


def few(budget: Budget) -> list[Contender]:
    """Ours and two rivals, with two trials each, so that there are no heats."""
    return [
        Contender(budget, "rank, seeded", "rank", RATES, "0,0", budget.seeded),
        Contender(budget, "packnet", "packnet", RATES),
        Contender(budget, "multitask", "multitask", RATES),
    ]


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("budgets", "front"):
        monkeypatch.setattr(f"rankup.paper.{module}.contenders", few)


def score(results: Results, contender: Contender, *accuracies: float) -> None:
    """Results of trials, in their order."""
    for trial, accuracy in zip(contender.finals(contender.tried), accuracies, strict=True):
        results.add(trial, [result(1000, [[accuracy]])])


def shown(contender: Contender, values: Values) -> Experiment:
    return replace(contender, tried=[values]).row(None).stand_ins[0]


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: budget.title)
def test_all_have_one_budget_and_as_many_trials(budget: Budget) -> None:
    rows = contenders(budget)
    assert {"rank", "rank, seeded", "packnet", "supsup", "hat", "ibpwf"} <= {r.name for r in rows}
    assert {"parallel full", "multitask"} <= {row.name for row in rows}
    assert budget.our_best in {row.name for row in rows}
    asked = {"epochs": budget.epochs, "crop": budget.given.get("crop", 0), "schedule": "one-cycle"}
    for row in rows:
        assert len(row.tried) == TRIALS
        heats, finals = row.heats(), row.finals(row.tried[: budgets.FINALISTS])
        assert len(set(heats)) == (0 if row.scores else TRIALS)
        assert {heat.epochs for heat in heats} <= {budget.heat_epochs}
        assert {heat.learned for heat in heats} <= {5}
        shown, *stand_ins = row.row(None).stand_ins
        assert stand_ins == ([] if row.scores else finals)
        for experiment in (*finals, shown):
            settings = {"crop": 0, **dict(experiment.settings)}
            assert {name: settings[name] for name in asked} == asked
            assert (experiment.width, experiment.net) == (budget.width, budget.net)
        assert {trial.held_out for trial in (*heats, *finals)} == {budgets.HELD_OUT}
        assert {seed for trial in (*heats, *finals) for seed in trial.all_seeds} == {1000}
        assert shown.all_seeds == range(3 if budget.net == "resnet18" else 5)


def test_the_best_of_the_heats_are_the_finalists(results: Results) -> None:
    """With few epochs on few tasks all settings, with all epochs the best three."""
    wide = replace(TINY, epochs=40, tasks=8)
    contender = Contender(wide, "packnet", "packnet", axis("lr", 0.01, 0.02, 0.03, 0.04, 0.05))
    heats = contender.heats()
    assert [(heat.epochs, heat.first, heat.held_out) for heat in heats] == [(5, 5, 0.15)] * 5
    for heat, accuracy in zip(heats, [0.5, 0.7, None, 0.9, 0.8], strict=True):
        assert contender.finalists(results) is None
        assert contender.row(results).trials == heats
        failed = {"failed": "diverged"} if accuracy is None else {}
        results.add(heat, [result(1000, [[accuracy]] if accuracy else [], **failed)])
    finalists = contender.finalists(results)
    assert finalists == axis("lr", 0.04, 0.05, 0.02)
    finals = contender.finals(finalists)
    assert contender.row(results).trials == [*heats, *finals]
    assert [(final.epochs, final.first) for final in finals] == [(40, None)] * 3
    for final, accuracy in zip(finals, [0.7, 0.6, 0.8], strict=True):
        assert contender.row(results).experiment is None
        results.add(final, [result(1000, [[accuracy]])])
    assert contender.row(results).experiment == shown(contender, {"lr": 0.02})


def test_settings_that_were_tried_before_need_no_heats() -> None:
    tried = axis("lr", 0.01, 0.02, 0.03, 0.04)
    contender = Contender(TINY, "hat", "hat", tried, scores=[0.5, 0.7, None, 0.6])
    assert contender.heats() == []
    assert contender.finalists(None) == axis("lr", 0.02, 0.04, 0.01)


def test_trials_of_resnet18_learn_half_of_the_stream() -> None:
    (cifar, _) = [budget for budget in BUDGETS if budget.net == "resnet18"]
    firsts = {row.name: row.finals(row.tried[:1])[0].first for row in contenders(cifar)}
    assert firsts["packnet"] == firsts["rank, both"] == 10
    assert firsts["supsup"] == firsts["rank, seeded"] == 5


def test_widths_and_epochs_are_those_of_our_best() -> None:
    asked = {(b.stream, b.net): set[tuple[int, int]]() for b in BUDGETS}
    for budget in BUDGETS:
        asked[budget.stream, budget.net].add((budget.width, budget.epochs))
    assert asked == {
        ("p-mnist", "mlp"): {(256, 20), (1024, 20)},
        ("r-mnist", "mlp"): {(256, 20), (1024, 20)},
        ("s-cifar100", "mlp"): {(256, 60), (1024, 60)},
        ("s-miniimagenet", "mlp"): {(256, 60), (1024, 60)},
        ("s-cifar100", "resnet18"): {(32, 80)},
        ("s-miniimagenet", "resnet18"): {(32, 80)},
    }


def test_rivals_to_come_have_a_row_once_they_are_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [row.name for row in contenders(TINY)]
    assert set(names) & set(budgets.RIVALS) == set(METHODS) & set(budgets.RIVALS)
    for name in ("wsn", "randlora"):
        monkeypatch.setitem(METHODS, name, METHODS["packnet"])
    assert {"wsn", "randlora"} <= {row.name for row in contenders(TINY)}


def test_trials_of_each_budget_are_kept_apart() -> None:
    wide = replace(TINY, width=32)
    one, other = (few(budget)[1].finals(RATES)[0] for budget in (TINY, wide))
    assert str(one.folder().parent) == "trials/p-digits-mlp-width-16-epochs-2"
    assert one.folder().parent != other.folder().parent
    assert str(few(TINY)[1]._shown(RATES[0]).folder().parent) == "p-digits-mlp"


def test_settings_tuned_for_other_budgets_are_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    experiment = few(TINY)[1].finals(RATES)[0]
    before = experiment.known()
    (tmp_path / "p-digits-mlp").mkdir()
    tuned = json.dumps({"chosen": {"retrain": 0.25, "weight_decay": 0.5}})
    (tmp_path / "p-digits-mlp" / "packnet.json").write_text(tuned)
    monkeypatch.setattr("rankup.methods.settings.TUNED", tmp_path)
    assert experiment.known() == before
    assert before["settings"] == {"epochs": 2, "lr": 0.01, "schedule": "one-cycle"}
    asked = experiment.request(Device.cpu, None)
    assert asked.is_complete
    assert (asked.held_out, asked.recipe_options["lr"]) == (0.15, 0.01)


def test_settings_are_chosen_by_held_out_data_alone(results: Results) -> None:
    packnet = few(TINY)[1]
    low, high = (shown(packnet, values) for values in RATES)
    # On test data the higher rate is better, on held-out data the lower one.
    results.add(low, [result(seed, [[0.5]]) for seed in range(2)])
    results.add(high, [result(seed, [[0.9]]) for seed in range(2)])
    assert packnet.row(results).experiment is None
    results.add(packnet.finals(RATES)[0], [result(1000, [[0.8]])])
    assert packnet.row(results).experiment is None  # a trial is missing
    results.add(packnet.finals(RATES)[1], [result(1000, [[0.7]])])
    assert packnet.row(results).experiment == low
    with pytest.raises(ValueError, match="never chosen on test data"):
        best_of([low, high], results)


def test_failed_trial_is_never_chosen(results: Results) -> None:
    packnet = few(TINY)[1]
    one, other = packnet.finals(RATES)
    results.add(one, [result(1000, [], failed="diverged")])
    assert cells(results, "packnet")[1] == "not run"
    results.add(other, [result(1000, [[0.1]])])
    assert packnet.row(results).experiment == shown(packnet, RATES[1])
    results.path(other).unlink()
    results.add(other, [result(1000, [], failed="diverged")])
    assert packnet.row(results).experiment is None
    assert cells(results, "packnet")[1] == "failed"


def cells(results: Results, name: str) -> list[str]:
    (row,) = (contender.row(results) for contender in few(TINY) if contender.name == name)
    _, line = lines(Section("", budgets.MEASURES, [row]), results)
    return line


@pytest.mark.usefixtures("little")
def test_table_by_hand(results: Results) -> None:
    ours, packnet, multitask = few(TINY)
    score(results, ours, 0.7, 0.8)
    score(results, packnet, 0.8, 0.7)
    # 0.90, 0.94 on average, and 0.80, 0.88: differences of 10 and 6 points.
    first = result(0, [[0.8], [0.88, 0.92]], parameters=250.0, seconds=60.0, answer=0.25)
    second = result(1, [[0.8], [0.92, 0.96]], parameters=250.0, seconds=30.0, answer=0.75)
    results.add(shown(ours, RATES[1]), [first, second])
    results.add(
        shown(packnet, RATES[0]),
        [
            result(0, [[0.8], [0.8, 0.8]], parameters=1000.0, buffer=500.0, seconds=6.0),
            result(1, [[0.8], [0.8, 0.96]], parameters=1000.0, buffer=500.0, seconds=6.0),
        ],
    )
    (section,) = equal_budgets([TINY]).given(results).sections
    heading, *rows = lines(section, results)
    assert heading == [
        "p-digits, MLP of width 16, 2 epochs",
        "accuracy %",
        "bytes stored",
        "minutes of training",
        "ms per answer",
        "against our best",
    ]
    # The standard deviation of −10 and −6 is 2√2, so the standard error is 2.
    assert rows == [
        ["rank, seeded", "92.00 ± 2.83", "1,000", "0.75", "0.500", "–"],
        ["packnet", "84.00 ± 5.66", "6,000", "0.10", "–", "−8.00 ± 2.00"],
        ["multitask", *["not run"] * 5],
    ]
    score(results, multitask, 0.9, 0.8)
    results.add(shown(multitask, RATES[0]), [result(1, [[0.8], [0.95, 0.97]])])
    (section,) = equal_budgets([TINY]).given(results).sections
    last = [*lines(section, results)][-1]
    # Only one seed, and against the same seed of ours.
    assert (last[0], last[1], last[-1]) == ("multitask (1 of 2 seeds)", "96.00", "+2.00")


@pytest.mark.parametrize(
    ("points", "best"),
    [
        ([], []),
        ([(10, 0.5)], [0]),
        ([(10, 0.9), (20, 0.8), (5, 0.7)], [2, 0]),  # 20 bytes are more and less accurate
        ([(10, 0.9), (10, 0.9), (30, 0.95)], [0, 1, 2]),  # equal ones both count
        ([(10, 0.9), (20, 0.9)], [0]),  # as accurate with fewer
        ([(10, 0.8), (10, 0.9)], [1]),  # more accurate with as many
    ],
)
def test_front_by_hand(points: Sequence[tuple[float, float]], best: list[int]) -> None:
    assert front(points) == best


@pytest.mark.usefixtures("little")
def test_figure_shows_what_was_run(results: Results, tmp_path: Path) -> None:
    figure = figure_front([TINY, replace(TINY, width=32)])
    assert figure.given(results).write("front", results, tmp_path) == []
    for budget in figure.budgets:
        for number, contender in enumerate(few(budget)):
            score(results, contender, 0.8, 0.7)
            run = result(0, [[0.5 + number / 10]], parameters=10.0**number * budget.width)
            results.add(shown(contender, RATES[0]), [run])
    given = figure.given(results)
    assert set(given.panels["p-digits-mlp"]) == {
        f"{name}, width {width}"
        for name in ("rank, seeded", "packnet", "multitask")
        for width in (16, 32)
    }
    assert given.write("front", results, tmp_path) == ["front-p-digits-mlp"]
    for ending in ("", "-dark"):
        assert (tmp_path / f"front-p-digits-mlp{ending}.png").stat().st_size > 1000


def test_front_leaves_out_the_bound(results: Results) -> None:
    from rankup.paper import front as module
    from rankup.report.figures import LIGHT, new_figure

    axes = new_figure(2, 2).add_subplot()
    points = {"multitask, width 16": (1, 99.0), "packnet, width 16": (9, 80.0)}
    module._draw_front(axes, points, LIGHT)
    (line,) = axes.lines
    assert [*line.get_xdata()] == [9]


def asked(*words: str) -> str:
    answer = CliRunner().invoke(app, ["paper", *words], env={"COLUMNS": "120"})
    if answer.exception and not isinstance(answer.exception, SystemExit):
        raise answer.exception
    return answer.output


@pytest.mark.usefixtures("little", "one_process")
def test_command_tunes_then_runs_and_never_repeats(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "equal_budgets", lambda: equal_budgets([TINY]))
    shown_parts = {"equal-budgets": paper.PARTS["equal-budgets"]}
    monkeypatch.setattr("rankup.cli.paper.PARTS", shown_parts)
    where = ["equal-budgets", "--results", str(results.root), "--device", "cpu"]
    assert "p-digits, mlp, width 16: 6 trials, 3 others" in asked(*where, "--left")
    assert not results.root.exists()
    first = asked(*where, "--tune", "--only", "packnet & lr 0.02")
    assert first.count("trial, p-digits, packnet") == 1
    assert "5 trials, 3 others" in asked(*where, "--left")
    tuned = asked(*where, "--tune", "--only", "packnet", "--only", "rank")
    assert tuned.count("trial, p-digits") == 3  # ours, and packnet's other one
    assert tuned.count("not run") == 3 * 5
    rows = asked(*where, "--only", "packnet", "--only", "rank")
    assert "trial, p-digits" not in rows
    assert rows.count("not run") == 5  # multitask
    last = asked(*where)  # its trials, then its row
    assert last.count("trial, p-digits, multitask") == 2
    assert "not run" not in last
    assert "accuracy %" in last
    assert asked(*where).count("epochs 2, lr") == 0
    assert "Nothing is left." in asked(*where, "--left")
    for contender in few(TINY):
        experiment = contender.row(results).experiment
        assert experiment is not None
        measured = results.of(experiment)
        assert measured is not None
        assert len(measured.answers) == 2
        assert min(measured.answers) > 0
        assert {run.config["recipe"]["lr"] for run in measured.runs} == {
            dict(experiment.settings)["lr"]
        }
        assert {run.config["held_out"] for run in measured.runs} == {0.0}
        trial = results.of(contender.finals(RATES)[0])
        assert trial is not None
        assert {run.config["held_out"] for run in trial.runs} == {0.15}


def test_time_left_by_hand(results: Results) -> None:
    five = Experiment.of("p-mnist", "packnet", epochs=5)
    runs = [replace(result(seed, [[0.5]], seconds=10.0), machine="a GPU") for seed in range(5)]
    results.add(five, runs)
    known = [five, Experiment.of("p-mnist", "hat", epochs=5)]
    assert main_machine(known, results) == "a GPU"
    # 50 s for five seeds of 20 tasks and 5 epochs: half a second for each task and epoch.
    pace = pace_on("a GPU", known, results)
    assert pace == {("p-mnist", "mlp", "packnet", False): 0.5, ("p-mnist", "mlp"): 0.5}
    trials = [
        Experiment.of("p-mnist", "packnet", epochs=20, width=256, lr=lr, seeds=1, held_out=0.15)
        for lr in (0.1, 0.2, 0.3)
    ]
    row = Experiment.of("p-mnist", "supsup", epochs=20, width=256)
    other = Experiment.of("s-cifar100", "packnet", epochs=20)
    # A trial takes 5/9 of 200 s, the row 200 s; two at once.
    assert left_of([*trials, row, other, five], results, pace, jobs=2) == [
        Left(
            "p-mnist, mlp, width 256",
            3,
            1,
            Minutes(pytest.approx((3 * 200 * 5 / 9 + 200) / 2 / 60), pytest.approx(200 / 60)),
        ),
        Left("s-cifar100, mlp", 0, 1, None),
    ]
    (alone,) = left_of([other], results, pace, jobs=2)
    assert str(alone) == "s-cifar100, mlp: 1 left; nothing to judge their time by"
    # No less than the longest.
    (only,) = left_of([row], results, pace, jobs=12)
    assert only.time is not None
    assert only.time.all == pytest.approx(200 / 60)


def test_parts_know_their_trials() -> None:
    table = part("equal-budgets")
    rows = [row for budget in BUDGETS for row in contenders(budget)]
    heats = [heat for row in rows for heat in row.heats()]
    assert {*heats} < {*table.experiments()}
    assert all(trial.held_out for trial in table.experiments())
    assert table.experiments() == part("figure-front").experiments()

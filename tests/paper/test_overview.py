"""What `rankup paper` alone says: how much is done, and how long the rest will take."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rankup.cli.main import app
from rankup.paper import PARTS, part
from rankup.paper.experiment import Experiment
from rankup.paper.overview import Share, overview, pace_of, share_of
from rankup.paper.results import Result, Results


def add(results: Results, experiment: Experiment, *seconds: float) -> None:
    """Add a run for each of the first seeds, which took these seconds."""
    results.add(experiment, [result(seed, took) for seed, took in enumerate(seconds)])


def result(seed: int, seconds: float) -> Result:
    config = {"versions": {"torch": "2"}, "device": "cpu"}
    return Result(seed, config, [[0.5]], 10, 0, seconds, "2026-11-16", "a machine", "rankup paper")


def test_time_left_is_estimated_from_runs_on_the_same_stream(tmp_path: Path) -> None:
    results = Results(tmp_path)
    quick = Experiment.of("p-mnist", "ewc", epochs=5, seeds=2)
    slow = Experiment.of("p-mnist", "agem", epochs=5, seeds=2)
    longer = Experiment.of("p-mnist", epochs=20, seeds=3)
    other = Experiment.of("s-cifar100", epochs=30, seeds=1)
    add(results, quick, 10.0, 20.0)
    add(results, slow, 45.0)
    experiments = [quick, slow, longer]
    one_task = Experiment.of("p-mnist", epochs=5, tasks=1, seeds=1)
    pace = pace_of([*experiments, other], results, "cpu")
    # Between 3 and 9 seconds for an epoch of twenty tasks.
    assert pace == {("p-mnist", "mlp"): pytest.approx(6.0 / 20)}
    left = 1 * 5 * 6.0 + 3 * 20 * 6.0
    assert share_of(experiments, results, pace) == Share(1, 3, 75.0, pytest.approx(left))
    assert share_of([one_task], results, pace) == Share(0, 1, 0.0, pytest.approx(5 * 6.0 / 20))
    assert pace_of(experiments, results, "cuda") == {}
    assert share_of([other], results, pace) == Share(0, 1, 0.0, None)


def test_run_shown_in_several_tables_counts_once(tmp_path: Path) -> None:
    (shared,) = {*part("last-layers").experiments()} & {*part("resnet18").experiments()}
    add(Results(tmp_path), shared, *[60.0] * shared.seeds)
    asked = ["paper", "--results", str(tmp_path)]
    said = CliRunner().invoke(app, asked, env={"COLUMNS": "80"}).output.splitlines()
    assert all(len(line) <= 80 for line in said)
    (whole,) = (line for line in said if line.split()[:1] == ["all"])
    every = {experiment for name in PARTS for experiment in part(name).experiments()}
    assert f"1 of {len(every):,}" in whole
    assert whole.split()[-1] == "?"
    assert "?: nothing like it was run on a cpu" in said[-2] + said[-1]
    assert "5 min 00 s" in whole


@pytest.mark.parametrize("name", PARTS)
def test_all_experiments_have_epochs(name: str) -> None:
    assert all(experiment.epochs >= 1 for experiment in part(name).experiments())


def test_overview_reads_each_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Experiment] = []
    read_file = Results._read

    def counted(results: Results, experiment: Experiment) -> dict[int, Result]:
        read.append(experiment)
        return read_file(results, experiment)

    monkeypatch.setattr(Results, "_read", counted)
    overview(Results(tmp_path), "cpu")
    assert (
        len(read)
        == len({*read})
        == len({experiment for name in PARTS for experiment in part(name).experiments()})
    )

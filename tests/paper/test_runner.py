"""Experiments are run once, several at once, in any pieces, and teachers first."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.experiments import result, tiny
from rankup.errors import RankupError
from rankup.paper import part, timings
from rankup.paper.experiment import Experiment
from rankup.paper.render import write_page
from rankup.paper.results import Results
from rankup.paper.runner import (
    WORK,
    Message,
    Runner,
    phases,
    share,
)
from rankup.paper.tables import Row, Section, Table, lines
from rankup.paper.timings import read_timings
from rankup.runs.launch import share_cores, share_queues
from rankup.runs.request import Device


def runner(results: Results) -> Runner:
    return Runner(results, Device.cpu, None, "rankup paper")


@pytest.mark.usefixtures("one_process")
def test_experiment_leaves_its_results_alone(results: Results) -> None:
    experiment, runs = tiny(), runner(results)
    assert results.of(experiment) is None
    assert runs.left([experiment]) == [experiment]
    assert runs.run(experiment, None, pytest.fail) == ""
    measured = results.of(experiment)
    assert measured is not None
    assert [run.seed for run in measured.runs] == [0, 1]
    assert len(measured.accuracy) == 2
    assert measured.forgetting == [0, 0]
    assert measured.matrix.shape == (2, 2)
    assert measured.averages.shape == (2, 2)
    assert measured.runs[0].config["recipe"]["epochs"] == 2
    assert json.loads(results.path(experiment).read_bytes())["known"] == experiment.known()
    assert runs.left([experiment]) == []
    assert not list((results.root / WORK).rglob("*.jsonl"))


@pytest.mark.usefixtures("one_process")
def test_only_missing_seeds_are_run(results: Results) -> None:
    experiment, runs = tiny(seeds=3), runner(results)
    results.add(experiment, [result(1, [[0.5], [0.5, 0.5]])])
    assert results.missing(experiment) == [0, 2]
    runs.run(experiment, None, pytest.fail)
    measured = results.of(experiment)
    assert measured is not None
    assert [run.seed for run in measured.runs] == [0, 1, 2]
    assert measured.accuracy[1] == 0.5


def test_stopped_run_is_resumed(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, runs = tiny(seeds=1), runner(results)

    def stop(now: object) -> None:
        if now.task == 1:  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    monkeypatch.setattr("rankup.runs.seed_run._TELL", 0.0)
    with pytest.raises(KeyboardInterrupt):
        runs.run(experiment, stop, pytest.fail)
    assert results.missing(experiment) == [0]
    learned: list[int] = []
    runs.run(experiment, lambda now: learned.append(now.task), pytest.fail)
    assert set(learned) == {1}
    assert results.missing(experiment) == []


def test_experiment_run_elsewhere_is_not_repeated(results: Results) -> None:
    experiment = tiny()
    results.add(experiment, [result(seed, [[0.9], [0.9, 0.8]]) for seed in range(2)])
    assert runner(results).run(experiment, None, print) == ""
    assert not results.failures(experiment)


@pytest.mark.usefixtures("one_process")
def test_unwritable_results_are_said(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Results, "add", closed)
    failed = runner(results).run(tiny(), None, print)
    assert "cannot be written" in failed
    assert "Permission denied; what was learned is kept" in failed
    assert "traceback" not in failed


def test_diverged_run_is_a_result(results: Results) -> None:
    experiment, runs = tiny(lr=1e6, seeds=1), runner(results)
    assert "diverged" in runs.run(experiment, None, lambda _: None)
    assert results.of(experiment) is None
    (why,) = results.failures(experiment)
    assert "diverged" in why
    assert runs.left([experiment]) == []
    table = Section("s", ("accuracy",), [Row("ours", experiment, (None,))])
    assert list(lines(table, results)) == [["s", "accuracy %"], ["ours", "failed"]]


def test_refused_run_is_tried_again(
    results: Results, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs = Runner(results, Device.cpu, tmp_path, "rankup paper")
    refused = Experiment.of("p-mnist", epochs=1, seeds=1)
    assert "mnist" in runs.run(refused, None, pytest.fail)
    assert runs.left([refused]) == [refused]

    def full(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("rankup.paper.runner.run_seeds", full)
    assert runs.run(tiny(), None, pytest.fail) == "there is too little memory for it"
    assert runs.left([tiny()]) == [tiny()]


def test_parallel_jobs_give_the_same_results(results: Results, tmp_path: Path) -> None:
    experiments = [tiny(seeds=1), tiny("finetune", seeds=1), tiny("ewc", seeds=1, lr=1e6)]
    said: list[Message] = []
    ended = {
        each.experiment: each for each in runner(results).run_all(experiments, said.append, jobs=2)
    }
    assert set(ended) == set(experiments)
    assert [bool(ended[experiment].failed) for experiment in experiments] == [False, False, True]
    assert {each.experiment for each in said} == set(experiments)
    alone = Results(tmp_path / "alone")
    for experiment in experiments[:2]:
        runner(alone).run(experiment, None, pytest.fail)
        one, other = results.of(experiment), alone.of(experiment)
        assert one is not None
        assert other is not None
        assert one.runs[0].accuracy == other.runs[0].accuracy
    assert not list(runner(results).run_all(experiments, pytest.fail, jobs=2, minutes=0))


@pytest.mark.parametrize(("processes", "queues"), [(1, "32"), (3, "32"), (12, "8"), (200, "1")])
def test_processes_share_the_queues_of_a_gpu(
    processes: int, queues: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")  # and after the test what it was before
    del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
    share_queues(processes)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == queues
    share_queues(1)  # as a run in that process does later
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == queues


@pytest.mark.parametrize(("processes", "percent"), [(1, "100"), (4, "75"), (12, "25")])
def test_small_networks_share_the_cores_of_a_gpu(
    processes: int, percent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "")
    del os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]
    share_cores(processes)
    assert os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == percent
    share_cores(3)  # a value that is already set stays
    assert os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == percent


def test_only_small_networks_share_cores(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Any] = []

    def in_processes(work: object, order: list[Any], *_: object, **__: object) -> Iterator[None]:
        jobs.extend(order)
        yield from ()

    monkeypatch.setattr("rankup.runs.process_pool.in_processes", in_processes)
    small, deep = tiny(), tiny(net="resnet18")
    teachers = [tiny(epochs=9), tiny(epochs=9, net="resnet18")]
    taught = [
        replace(experiment, teacher=teacher)
        for experiment, teacher in zip((small, deep), teachers, strict=True)
    ]
    list(runner(results).run_all([small, deep, *taught, *teachers], pytest.fail, jobs=4))
    assert {job.experiment for job in jobs if job.small} == {small, taught[0]}


def test_phases_limit_large_networks_and_put_long_first() -> None:
    small = [tiny(epochs=epochs) for epochs in (3, 50, 4)]
    resnet = [tiny(epochs=epochs, net="resnet18") for epochs in (20, 80)]
    wide = [replace(tiny(epochs=7), stream="s-miniimagenet")]
    found = phases([*small, *resnet, *wide], jobs=8)
    epochs = [(jobs, [experiment.epochs for experiment in some]) for jobs, some in found]
    assert epochs == [(2, [80, 20]), (2, [7]), (8, [50, 4, 3])]
    assert [jobs for jobs, _ in phases([*small, *resnet], jobs=3)] == [1, 3]
    ((_, order),) = phases([tiny(epochs=9, seeds=2), tiny(epochs=5, seeds=5)], jobs=2)
    assert [experiment.seeds for experiment in order] == [5, 2]
    ((_, order),) = phases([tiny("finetune", epochs=9), tiny("nscl", epochs=5)], jobs=2)
    assert [experiment.method for experiment in order] == ["nscl", "finetune"]


def test_shares_cover_each_experiment_once() -> None:
    experiments = part("accuracy").experiments()
    parts = [experiment for number in (1, 2, 3) for experiment in share(experiments, f"{number}/3")]
    assert sorted(map(str, parts)) == sorted(map(str, experiments))
    assert len(parts) == len(experiments)
    for wrong in ("0/3", "4/3", "3", "a/b"):
        with pytest.raises(RankupError, match="a share is written like 1/4"):
            share(experiments, wrong)


def test_page_says_how_long_runs_took(results: Results, tmp_path: Path) -> None:
    experiments, page = [tiny(seeds=1), tiny("finetune", seeds=1)], tmp_path / "page.md"
    rows = [Row(experiment.method, experiment, [None]) for experiment in experiments]
    table = Table("A table", [Section("digits", ("accuracy",), rows)])
    for experiment in experiments:
        assert [
            ended.failed for ended in runner(results).run_all([experiment], lambda _: None)
        ] == [""]
        write_page({"accuracy": table}, results, page)
        who = "All 2" if experiment == experiments[1] else "1 of 2"
        assert f"\n{who} settings took 0 min on one " in page.read_text()
    first, second = read_timings(results.root)
    assert first.cells == [str(experiments[0].folder())]
    assert second.cells == [str(experiments[1].folder())]
    assert min(first.seconds, second.seconds) > 0
    assert not list(runner(results).run_all([], lambda _: None))  # nothing to wait for
    assert len(read_timings(results.root)) == 2


def test_page_names_every_version_of_torch(results: Results, tmp_path: Path) -> None:
    experiment, page = tiny(seeds=2), tmp_path / "page.md"
    for seed, torch in enumerate(("2.1", ["2.1", "2.2"])):
        config = {"versions": {"torch": torch}}
        done = replace(result(seed, [[0.5]]), config=config, machine="a GPU", date="2026-01-01")
        results.add(experiment, [done])
    table = Table("A table", [Section("s", ("accuracy",), [Row("ours", experiment, (None,))])])
    write_page({"accuracy": table}, results, page)
    assert "- 1 on a GPU, torch 2.1\n- 1 on a GPU, torch 2.1, 2.2\n" in page.read_text()


def test_stopped_timing_keeps_finished_experiments(results: Results) -> None:
    experiments = [tiny("finetune", seeds=1), tiny(seeds=1)]
    with closing(runner(results).run_all(experiments, lambda _: None)) as ended:
        next(ended)
    (timing,) = read_timings(results.root)
    assert timing.cells == [str(experiments[0].folder())]


def test_timing_is_written_while_running(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed writes nothing more."""
    monkeypatch.setattr(timings, "_OFTEN", 0.0)
    seconds: list[float] = []

    def look(said: Message) -> None:
        (timing,) = read_timings(results.root)
        assert timing.cells == []
        seconds.append(timing.seconds)

    assert list(runner(results).run_all([tiny(seeds=1)], look))
    assert seconds == sorted(seconds)
    assert seconds[-1] > 0


def test_nothing_runs_if_timings_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "pieces").write_text("a file")
    said: list[Message] = []
    with pytest.raises(RankupError, match=r"pieces/.*\.json cannot be written: "):
        list(runner(Results(tmp_path)).run_all([tiny()], said.append))
    assert not said


def test_damaged_timing_is_named(results: Results) -> None:
    path = results.root / "pieces" / "broken.json"
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    with pytest.raises(RankupError, match=r"broken\.json does not say how long a piece took"):
        read_timings(results.root)


def test_pupil_learns_from_its_teachers_networks(results: Results) -> None:
    teacher = tiny(seeds=1, rank="0,0", seeded="64", epochs=8)
    pupil, alone = tiny(seeds=1, teacher=teacher), tiny(seeds=1)
    assert pupil.folder() not in (teacher.folder(), alone.folder())
    assert "taught" in str(pupil)
    # Teachers come first in any case, and what they know is kept until it is no longer needed.
    ended = [
        experiment.experiment
        for experiment in runner(results).run_all([pupil, teacher, alone], lambda _: None)
    ]
    assert ended == [teacher, alone, pupil]
    assert not list((results.root / WORK).rglob("net"))
    found = [results.of(experiment) for experiment in (teacher, alone, pupil)]
    assert all(found)
    assert found[1].runs[0].accuracy != found[2].runs[0].accuracy  # type: ignore[union-attr]
    told = found[2].runs[0].config["options"]["teacher"]  # type: ignore[union-attr]
    assert told == str(teacher.folder())


def test_missing_teacher_is_trained_first(results: Results) -> None:
    teacher = tiny(seeds=1, epochs=8)
    pupil = tiny(seeds=1, epochs=1, teacher=teacher)
    assert runner(results).run(pupil, None, pytest.fail) == ""
    assert results.of(teacher) is not None
    again = results.path(teacher).read_bytes()
    other = tiny(seeds=1, epochs=2, teacher=teacher)  # its teacher must be trained again
    assert runner(results).run(other, None, pytest.fail) == ""
    assert results.path(teacher).read_bytes() == again
    assert not list((results.root / WORK).rglob("net"))


def test_pupil_of_a_failed_teacher_is_not_run(results: Results) -> None:
    teacher = tiny(seeds=1, lr=1e9)
    pupil = tiny(seeds=1, teacher=teacher)
    assert "its teacher failed" in runner(results).run(pupil, None, pytest.fail)
    assert results.missing(pupil) == [0]
    assert results.failures(teacher)


def test_phases_put_teachers_first() -> None:
    teacher = Experiment.of("p-mnist", epochs=5)
    pupil = Experiment.of("s-cifar100", net="resnet18", epochs=20, teacher=teacher)
    others = [Experiment.of("s-cifar100", net="resnet18", epochs=epochs) for epochs in (10, 30)]
    found = [some for _, some in phases([pupil, *others, teacher], 4)]
    assert found == [[teacher], [others[1], pupil, others[0]]]

"""Several seeds at once give the same results as each of them alone."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch

import rankup
from helpers.runs import config_for, outcome
from rankup.data.streams import Stream, make_stream
from rankup.runs import many_seeds, process_pool
from rankup.runs.many_seeds import run_seeds
from rankup.runs.read import read_run
from rankup.runs.run import run, run_together
from rankup.runs.seed_run import Progress, SeedRun


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Runs set the number of threads, which must not affect the tests after them."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def stream_of(seed: int) -> Stream:
    return make_stream("p-digits", tasks=2, seed=seed)


def asked(seed: int, out: Path, *, resume: bool = False) -> SeedRun:
    config = replace(config_for(stream_of(seed)), seed=seed, threads=1)
    return SeedRun(config, None, out, resume)


def test_seeds_in_processes_equal_each_alone(tmp_path: Path) -> None:
    """The first had been stopped after its first task."""
    told: list[Progress] = []
    first = asked(0, tmp_path / "seed-0").config
    run(first, stream_of(0).first(1), tmp_path / "seed-0")
    seeds = [asked(seed, tmp_path / f"seed-{seed}", resume=True) for seed in range(2)]
    assert run_seeds(seeds, on_progress=told.append, note=pytest.fail) == {}
    for seed in range(2):
        alone = tmp_path / f"alone-{seed}"
        run(seeds[seed].config, stream_of(seed), alone)
        assert outcome(alone) == outcome(tmp_path / f"seed-{seed}")
        files = [path.relative_to(alone) for path in alone.rglob("*") if path.is_file()]
        assert Path("config.json") in files
        for file in files:
            if file.name not in ("metrics.jsonl", ".lock"):  # which has times
                there = tmp_path / f"seed-{seed}" / file
                assert there.read_bytes() == (alone / file).read_bytes()
    assert {(progress.seed, progress.epochs) for progress in told} == {(0, 2), (1, 2)}
    assert outcome(tmp_path / "seed-0")[1] != outcome(tmp_path / "seed-1")[1]
    for again in seeds:
        again.resume = False
    with pytest.raises(rankup.RankupError, match="already holds a run: add --resume"):
        run_seeds(seeds, note=pytest.fail)


def test_two_processes_do_not_work_in_one_folder(tmp_path: Path) -> None:
    seed = asked(0, tmp_path / "run")
    refused = []

    def try_too(_: Progress) -> None:
        with pytest.raises(rankup.RankupError, match="another process is using .*run: wait"):
            run(seed.config, stream_of(0), seed.folder, resume=True)
        refused.append(True)

    assert run_together([seed], on_progress=try_too) == {}
    assert refused
    run(seed.config, stream_of(0), seed.folder, resume=True)  # no process is left in it


@pytest.mark.parametrize("case", ["seeds", "lengths", "rates"])
def test_runs_in_one_process_equal_each_alone(case: str, tmp_path: Path) -> None:
    """As on a GPU, where they share a graph; here they take turns."""
    config, streams = asked(0, tmp_path).config, [stream_of(0)] * 2
    if case == "seeds":
        configs, streams = [config, replace(config, seed=1)], [stream_of(0), stream_of(1)]
    elif case == "lengths":  # with other numbers of epochs and of samples
        configs = [replace(config, recipe=config.recipe | {"epochs": e}) for e in (6, 7)]
        fewer = (replace(t, train_x=t.train_x[:900], train_y=t.train_y[:900]) for t in streams[0])
        streams = [Stream("p-digits", tuple(fewer)), streams[1]]
    else:
        configs = [replace(config, recipe=config.recipe | {"lr": lr}) for lr in (1e-2, 2e-2)]
        assert len({each.but_for_its_seed() for each in configs}) == 2
    pairs = list(enumerate(zip(configs, streams, strict=True)))
    assert run_together([SeedRun(c, s, tmp_path / f"{n}") for n, (c, s) in pairs]) == {}
    for number, (settings, stream) in pairs:
        run(settings, stream, tmp_path / f"alone-{number}")
        assert outcome(tmp_path / f"{number}") == outcome(tmp_path / f"alone-{number}")
    assert outcome(tmp_path / "0") != outcome(tmp_path / "1")


def test_failed_seed_leaves_the_others_to_go_on(tmp_path: Path) -> None:
    good, bad = stream_of(0), stream_of(1)
    noise = replace(bad[1], train_x=torch.zeros_like(bad[1].train_x))
    runs = [
        SeedRun(asked(0, tmp_path).config, good, tmp_path / "0"),
        SeedRun(asked(1, tmp_path).config, Stream("p-digits", (bad[0], noise)), tmp_path / "1"),
    ]
    failures = run_together(runs)
    assert list(failures) == [runs[1]]
    assert "task 'permutation 02' was not learned" in str(failures[runs[1]])
    assert len(read_run(tmp_path / "0").tasks) == 2
    assert rankup.load(tmp_path / "1" / "net").tasks == ["permutation 01"]


def die(_: SeedRun) -> str | None:
    os.kill(os.getpid(), signal.SIGKILL)


def dead(*_: object, lost: str, **__: object) -> NoReturn:
    raise rankup.RankupError(lost)


@pytest.mark.parametrize("resume", [False, True])
def test_killed_process_says_how_to_continue(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rankup paper` has no --resume, and always goes on."""
    monkeypatch.setattr(many_seeds, "_run_one", die)
    if resume:  # once it is a process of its own
        monkeypatch.setattr(process_pool.ProcessPool, "run", dead)
    monkeypatch.setattr(process_pool, "cores", lambda: 1)
    seeds = [asked(seed, tmp_path / f"seed-{seed}", resume=resume) for seed in range(2)]
    again = "the same command" if resume else "the same command with --resume"
    sentence = f"a process that ran a seed was killed, perhaps .*; run {again} to continue$"
    with pytest.raises(rankup.RankupError, match=sentence):
        run_seeds(seeds, note=pytest.fail)

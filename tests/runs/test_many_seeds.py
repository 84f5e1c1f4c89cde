"""Several seeds at once give the same results as each of them alone."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rankup
from helpers.runs import config_for, outcome
from rankup.data.streams import Stream, make_stream
from rankup.runs import many_seeds
from rankup.runs.many_seeds import run_seeds
from rankup.runs.read import read_run
from rankup.runs.run import Progress, SeedRun, run, run_together


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


def test_a_seeds_folder_is_byte_for_byte_what_the_seed_alone_gives(tmp_path: Path) -> None:
    told: list[Progress] = []
    seeds = [asked(seed, tmp_path / f"seed-{seed}") for seed in range(3)]
    assert run_seeds(seeds, on_progress=told.append, note=pytest.fail) == {}
    for seed in range(3):
        alone = tmp_path / f"alone-{seed}"
        run(seeds[seed].config, stream_of(seed), alone)
        assert outcome(alone) == outcome(tmp_path / f"seed-{seed}")
        files = [path.relative_to(alone) for path in alone.rglob("*") if path.is_file()]
        assert Path("config.json") in files
        for file in files:
            if file.name not in ("metrics.jsonl", ".lock"):  # which has times
                there = tmp_path / f"seed-{seed}" / file
                assert there.read_bytes() == (alone / file).read_bytes()
    assert {progress.seed for progress in told} == {0, 1, 2}
    assert all(progress.epochs == 2 for progress in told)
    different = {outcome(tmp_path / f"seed-{seed}")[1][0]["accuracy"][0] for seed in range(3)}
    assert len(different) > 1


def test_seeds_go_on_where_each_was_stopped(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run_seeds([asked(seed, whole / f"{seed}") for seed in range(2)], note=pytest.fail)
    config = asked(0, stopped / "0").config
    run(replace(config, tasks=2), Stream("p-digits", stream_of(0).tasks[:1]), stopped / "0")
    (stopped / "0" / "checkpoint.safetensors").unlink(missing_ok=True)
    again = [asked(seed, stopped / f"{seed}", resume=True) for seed in range(2)]
    run_seeds(again, note=pytest.fail)
    for seed in range(2):
        assert outcome(stopped / f"{seed}") == outcome(whole / f"{seed}")


def test_two_processes_do_not_work_in_one_folder(tmp_path: Path) -> None:
    seed = asked(0, tmp_path / "run")
    refused = []

    def try_too(_: Progress) -> None:
        with pytest.raises(rankup.RankupError, match="another process is using .*run: wait"):
            run(seed.config, stream_of(0), seed.out, resume=True)
        refused.append(True)

    assert run_together([seed], on_progress=try_too) == {}
    assert refused
    run(seed.config, stream_of(0), seed.out, resume=True)  # no process is left in it


def test_seeds_in_one_process_are_those_seeds_alone(tmp_path: Path) -> None:
    """As on a GPU, where they share a graph; here they take turns."""
    together = [
        SeedRun(asked(seed, tmp_path).config, stream_of(seed), tmp_path / f"{seed}")
        for seed in range(2)
    ]
    assert run_together(together) == {}
    for seed in range(2):
        run(asked(seed, tmp_path).config, stream_of(seed), tmp_path / f"alone-{seed}")
        assert outcome(tmp_path / f"{seed}") == outcome(tmp_path / f"alone-{seed}")


def test_runs_of_different_length_learn_as_long_as_each_of_them_alone(tmp_path: Path) -> None:
    config = asked(0, tmp_path).config
    config = replace(config, recipe=config.recipe | {"epochs": 6})
    whole, stream = stream_of(0), {}
    stream[0] = whole
    stream[1] = Stream(
        whole.name,
        tuple(replace(t, train_x=t.train_x[:900], train_y=t.train_y[:900]) for t in whole),
    )
    stream[2] = whole
    configs = [config, config, replace(config, recipe=config.recipe | {"epochs": 7})]
    together = [
        SeedRun(each, stream[number], tmp_path / f"{number}") for number, each in enumerate(configs)
    ]
    assert run_together(together) == {}
    for number, each in enumerate(configs):
        run(each, stream[number], tmp_path / f"alone-{number}")
        assert outcome(tmp_path / f"{number}") == outcome(tmp_path / f"alone-{number}")


def test_runs_that_differ_in_more_than_the_seed_may_learn_together(tmp_path: Path) -> None:
    config = asked(0, tmp_path).config
    configs = [replace(config, recipe=config.recipe | {"lr": lr}) for lr in (1e-2, 2e-2)]
    assert len({each.but_for_its_seed() for each in configs}) == 2
    together = [
        SeedRun(each, stream_of(0), tmp_path / f"{number}") for number, each in enumerate(configs)
    ]
    assert run_together(together) == {}
    for number, each in enumerate(configs):
        run(each, stream_of(0), tmp_path / f"alone-{number}")
        assert outcome(tmp_path / f"{number}") == outcome(tmp_path / f"alone-{number}")
    assert outcome(tmp_path / "0") != outcome(tmp_path / "1")


def test_a_seed_that_fails_leaves_the_others_to_go_on(tmp_path: Path) -> None:
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


def test_bad_input_of_a_process_is_said_in_one_sentence(tmp_path: Path) -> None:
    seeds = [asked(seed, tmp_path / f"{seed}") for seed in range(2)]
    run_seeds(seeds, note=pytest.fail)
    with pytest.raises(rankup.RankupError, match="already holds a run: add --resume"):
        run_seeds(seeds, note=pytest.fail)


def die(seed: SeedRun) -> str | None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("resume", [False, True])
def test_it_is_said_how_to_go_on_after_a_process_was_killed(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rankup paper` has no --resume, and always goes on."""
    monkeypatch.setattr(many_seeds, "_run_one", die)
    seeds = [asked(seed, tmp_path / f"seed-{seed}", resume=resume) for seed in range(2)]
    again = "the same command" if resume else "the same command with --resume"
    with pytest.raises(rankup.RankupError, match=f"was killed, .*; run {again} to continue$"):
        run_seeds(seeds, note=pytest.fail)

"""Checkpoints in a run's folder: those that cannot be resumed from count as none."""

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

import rankup
from helpers.runs import config_for, outcome
from rankup.data.streams import Stream, make_stream
from rankup.runs import checkpoints as in_folders
from rankup.runs.checkpoints import (
    CHECKPOINT,
    Checkpoints,
    OpenTask,
    read_checkpoint,
    write_checkpoint,
)
from rankup.runs.run import run, run_together
from rankup.runs.seed_run import SeedRun
from rankup.training.checkpoint import Checkpoint
from rankup.training.engine.select import Engine
from rankup.training.loop import learn


@pytest.fixture(scope="module")
def stream() -> Stream:
    return make_stream("p-digits", tasks=2)


def numbered(index: int) -> OpenTask:
    return OpenTask(index, f"permutation {index + 1:02}", 0, {"lr": 0.1})


def test_stored_checkpoint_is_for_one_task(tmp_path: Path) -> None:
    state = {"flat": torch.rand(3)}
    write_checkpoint(tmp_path, numbered(1), Checkpoint(7, state))
    loaded = read_checkpoint(tmp_path, numbered(1), pytest.fail)
    assert loaded is not None
    assert loaded.epoch == 7
    assert torch.equal(loaded.state["flat"], state["flat"])
    assert read_checkpoint(tmp_path, numbered(2), pytest.fail) is None


def saved(at: str | None, **tensors: torch.Tensor) -> bytes:
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    return safetensors.torch.save(copies, None if at is None else {"at": at})


NUMBERS = torch.zeros(3)
FIRST = '{"task": 0, "epoch": 1}'
BROKEN = {
    "empty": b"",
    "zeros": bytes(4096),
    "cut": saved(FIRST, flat=NUMBERS)[:-2],
    "no metadata": saved(None, flat=NUMBERS),
    "other metadata": saved("[]", flat=NUMBERS),
    "no epoch": saved('{"task": 0}', flat=NUMBERS),
    "other names": saved(FIRST, other=NUMBERS),
    "other shapes": saved(FIRST, flat=NUMBERS, mean=NUMBERS, square=NUMBERS, count=NUMBERS[0]),
    "other epochs": saved('{"task": 0, "epoch": 9}', flat=NUMBERS),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one task that was not interrupted."""
    out, stream = tmp_path_factory.mktemp("runs") / "whole", make_stream("p-digits", tasks=1)
    run(config_for(stream, epochs=2), stream, out)
    return out


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_broken_checkpoint_starts_the_task_over(
    content: bytes, whole: Path, tmp_path: Path
) -> None:
    stream, notes = make_stream("p-digits", tasks=1), list[str]()
    shutil.copy(whole / "config.json", tmp_path)
    (tmp_path / CHECKPOINT).write_bytes(content)
    again = SeedRun(config_for(stream, epochs=2), stream, tmp_path, resume=True)
    assert run_together([again], note=notes.append) == {}
    assert outcome(tmp_path) == outcome(whole)
    assert len(notes) == 1
    assert "starts over: " in notes[0]
    assert "\n" not in notes[0]


def test_runs_in_one_process_store_the_same_epochs(
    stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if one of them takes longer to write."""
    written: dict[str, list[tuple[int, int]]] = {"0": [], "1": []}

    def noted(out: Path, task: OpenTask, checkpoint: Checkpoint) -> None:
        written[out.name].append((task.index, checkpoint.epoch))
        time.sleep(0.0 if out.name == "0" else 0.002)
        write_checkpoint(out, task, checkpoint)

    monkeypatch.setattr(in_folders, "write_checkpoint", noted)
    config, threads = config_for(stream, epochs=15), torch.get_num_threads()
    runs = [SeedRun(config, stream, tmp_path / out) for out in written]
    assert run_together(runs) == {}
    torch.set_num_threads(threads)
    assert written["0"] == written["1"]
    assert 1 <= len(written["0"]) < 2 * 15


def test_checkpoints_take_two_percent_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, written = [0.0], list[int]()

    def slow(out: Path, task: OpenTask, checkpoint: Checkpoint) -> None:
        written.append(checkpoint.epoch)
        clock[0] += 1

    monkeypatch.setattr(in_folders.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(in_folders, "write_checkpoint", slow)
    checkpoints = Checkpoints(pytest.fail)
    for epoch in range(1, 31):
        clock[0] += 10
        for seed in range(2):
            checkpoints.keep(tmp_path / f"{seed}", numbered(0), Checkpoint(epoch, {}))
    assert written == [1, 1, 11, 11, 21, 21]  # two seconds each, of a hundred


@pytest.mark.parametrize("stopped", [(1, 2), (None, 2)])
def test_seeds_stopped_in_different_epochs_start_over(
    stopped: tuple[int | None, int], stream: Stream, tmp_path: Path
) -> None:
    """As if a process was killed between writing two checkpoints."""
    configs = [replace(config_for(stream, epochs=4), seed=seed) for seed in range(2)]

    def seed_runs(folder: str) -> list[SeedRun]:
        return [SeedRun(own, stream, tmp_path / folder / str(own.seed), True) for own in configs]

    whole, notes = seed_runs("whole"), list[str]()
    kept: list[list] = [[None], [None]]  # by epochs done
    watches = [lambda _, point, own=own: own.append(point) for own in kept]
    assert learn([r.method for r in whole], [stream[0]] * 2, Engine(), None, watches) == [None] * 2
    again = seed_runs("again")
    for own, points, epochs in zip(again, kept, stopped, strict=True):
        own.open()
        if epochs is not None:
            points[epochs].seconds = 1000.0
            write_checkpoint(own.out, own.open_task, points[epochs])
    assert run_together(again, note=notes.append) == {}
    assert len(notes) == 1
    assert "starts over: what is learned together was stopped after different epochs" in notes[0]
    x = rankup.data.to_float(stream[0].test_x).flatten(1)
    for one, other in zip(whole, again, strict=True):
        assert torch.equal(one.method.predict(x, 0), other.method.predict(x, 0))
        assert other.lines[0]["seconds"] < 1000  # what was learned in vain is not counted

"""A checkpoint stays as it was when made, and one that cannot be resumed from counts as none."""

import pickle
import time
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

import rankup
from helpers.runs import config_for, outcome
from helpers.zoo import assert_same_bits, logits
from rankup.data.streams import Stream, make_stream
from rankup.rank import Rank
from rankup.runs import folder as in_folders
from rankup.runs.folder import CHECKPOINT, Checkpoints, read_checkpoint, write_checkpoint
from rankup.runs.run import SeedRun, run, run_together
from rankup.training.checkpoint import Checkpoint, CheckpointError
from rankup.training.engine.eager import Eager
from rankup.training.engine.select import Engine
from rankup.training.loop import Epoch, learn
from rankup.training.recipe import Recipe

RECIPE = Recipe(epochs=3, batch=128)


@pytest.fixture(scope="module")
def stream() -> Stream:
    return make_stream("p-digits", tasks=2)


def net(*hidden: int) -> rankup.IncrementalNet:
    return rankup.grow(rankup.models.mlp(64, hidden=hidden or (16, 16)), Rank(2, 1, seeded=4))


# What `fit` hands out


@pytest.mark.parametrize("looks", [True, False])
def test_kept_checkpoint_does_not_change(stream: Stream, looks: bool) -> None:
    kept: list[Checkpoint] = []

    def keep(_: Epoch, checkpoint: Checkpoint) -> None:
        kept.append(checkpoint)
        assert not looks or checkpoint.state

    whole = rankup.fit(net(), stream[0], RECIPE, on_epoch=keep)
    assert [checkpoint.epoch for checkpoint in kept] == [1, 2, 3]
    x = stream[1].test_x.flatten(1).float()
    for checkpoint in kept:
        again = rankup.fit(net(), stream[0], RECIPE, resume=checkpoint)
        assert_same_bits(logits(whole, x), logits(again, x))


def test_checkpoint_kept_before_an_interrupt_resumes(stream: Stream) -> None:
    kept: list[rankup.Checkpoint] = []

    def stop(_: Epoch, checkpoint: Checkpoint) -> None:
        kept.append(checkpoint)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rankup.fit(net(), stream[0], RECIPE, on_epoch=stop)
    again = rankup.fit(net(), stream[0], RECIPE, resume=kept[0])
    x = stream[1].test_x.flatten(1).float()
    assert_same_bits(logits(rankup.fit(net(), stream[0], RECIPE), x), logits(again, x))


def test_state_is_copied_only_on_access(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    state = Eager.state

    def counted(steps: Eager, number: int) -> dict[str, torch.Tensor]:
        taken.append(number)
        return state(steps, number)

    monkeypatch.setattr(Eager, "state", counted)
    rankup.fit(net(), stream[0], RECIPE, on_epoch=lambda epoch, checkpoint: None)
    assert taken == []


def test_checkpoint_can_be_pickled(stream: Stream) -> None:
    pickled: list[bytes] = []
    rankup.fit(
        net(), stream[0], RECIPE, on_epoch=lambda _, point: pickled.append(pickle.dumps(point))
    )
    first = pickle.loads(pickled[0])
    assert first.epoch == 1
    assert first.state["flat"].isfinite().all()


def test_checkpoint_with_other_tensors_is_refused(stream: Stream) -> None:
    kept: list[Checkpoint] = []
    rankup.fit(net(), stream[0], RECIPE, on_epoch=lambda _, point: kept.append(point))
    point = Checkpoint(kept[-1].epoch, kept[-1].state)  # as from a folder, which holds no more
    for network, recipe, message in (
        (
            net(16, 8),
            RECIPE,
            r"different network or optimiser: 'flat' is float32 \[\d+\] in it, but",
        ),
        (net(), replace(RECIPE, optimiser="sgd"), "'mean' is float32 .* in it, but missing here"),
        (net(), replace(RECIPE, epochs=2), "was made after epoch 3, but the recipe has 2"),
    ):
        with pytest.raises(rankup.RankupError, match=message):
            rankup.fit(network, stream[0], recipe, resume=point)
        assert network.learning is None


# In a run's folder


def test_stored_checkpoint_is_for_one_task(tmp_path: Path) -> None:
    state = {"flat": torch.rand(3)}
    write_checkpoint(tmp_path, 1, Checkpoint(7, state))
    loaded = read_checkpoint(tmp_path, 1, pytest.fail)
    assert loaded is not None
    assert loaded.epoch == 7
    assert torch.equal(loaded.state["flat"], state["flat"])
    assert read_checkpoint(tmp_path, 2, pytest.fail) is None


def saved(at: str | None, **tensors: torch.Tensor) -> bytes:
    own = {name: tensor.clone() for name, tensor in tensors.items()}
    return safetensors.torch.save(own, None if at is None else {"at": at})


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


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_broken_checkpoint_starts_the_task_over(
    content: bytes, stream: Stream, tmp_path: Path
) -> None:
    config, notes = config_for(stream), list[str]()
    run(config, stream, tmp_path / "whole")
    (tmp_path / "broken").mkdir()
    told = (tmp_path / "whole" / "config.json").read_bytes()
    (tmp_path / "broken" / "config.json").write_bytes(told)
    (tmp_path / "broken" / CHECKPOINT).write_bytes(content)
    again = SeedRun(config, stream, tmp_path / "broken", resume=True)
    assert run_together([again], note=notes.append) == {}
    assert outcome(tmp_path / "broken") == outcome(tmp_path / "whole")
    assert len(notes) == 1
    assert "starts over: " in notes[0]
    assert "\n" not in notes[0]


def test_runs_in_one_process_store_the_same_epochs(
    stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if one of them takes longer to write."""
    written: dict[str, list[tuple[int, int]]] = {"0": [], "1": []}

    def noted(out: Path, task: int, checkpoint: Checkpoint) -> None:
        written[out.name].append((task, checkpoint.epoch))
        time.sleep(0.0 if out.name == "0" else 0.002)
        write_checkpoint(out, task, checkpoint)

    monkeypatch.setattr(in_folders, "write_checkpoint", noted)
    config, threads = config_for(stream, epochs=40), torch.get_num_threads()
    runs = [SeedRun(config, stream, tmp_path / out) for out in written]
    assert run_together(runs) == {}
    torch.set_num_threads(threads)
    assert written["0"] == written["1"]
    assert 1 <= len(written["0"]) < 2 * 40


def test_checkpoints_take_two_percent_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, written = [0.0], list[int]()

    def slow(out: Path, task: int, checkpoint: Checkpoint) -> None:
        written.append(checkpoint.epoch)
        clock[0] += 1

    monkeypatch.setattr(in_folders.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(in_folders, "write_checkpoint", slow)
    checkpoints = Checkpoints(pytest.fail)
    for epoch in range(1, 31):
        clock[0] += 10
        for seed in range(2):
            checkpoints.keep(tmp_path / f"{seed}", 0, Checkpoint(epoch, {}))
    assert written == [1, 1, 11, 11, 21, 21]  # two seconds each, of a hundred
    assert issubclass(CheckpointError, rankup.RankupError)


@pytest.mark.parametrize("found", [(1, 2), (None, 2)])
def test_seeds_stopped_in_different_epochs_start_over(
    found: tuple[int | None, int], stream: Stream, tmp_path: Path
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
    for own, points, epochs in zip(again, kept, found, strict=True):
        own.open()
        if epochs is not None:
            points[epochs].seconds = 1000.0
            write_checkpoint(own.out, 0, points[epochs])
    assert run_together(again, note=notes.append) == {}
    assert len(notes) == 1
    assert "starts over: what is learned together was stopped after different epochs" in notes[0]
    x = rankup.data.to_float(stream[0].test_x).flatten(1)
    for one, other in zip(whole, again, strict=True):
        assert torch.equal(one.method.predict(x, 0), other.method.predict(x, 0))
        assert other.lines[0]["seconds"] < 1000  # what was learned in vain is not counted

"""What a run writes is sealed: what does not match its seal is never taken for what was written."""

import json
import os
import random
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.calling import Call
from helpers.damage import flip_bit
from helpers.reports import constant, write_old_run
from helpers.runs import config_for
from rankup.data.streams import Stream
from rankup.errors import RankupError
from rankup.runs import records
from rankup.runs.checkpoints import CHECKPOINT, OpenTask, read_checkpoint, write_checkpoint
from rankup.runs.folder import RunConfig
from rankup.runs.read import read_run
from rankup.runs.records import is_sealed, raw_lines, read_config, read_lines
from rankup.runs.run import run
from rankup.runs.seed_run import SeedRun
from rankup.training.checkpoint import Checkpoint

pytestmark = pytest.mark.usefixtures("no_plots")

OLD = Path(__file__).parents[1] / "version-0.1" / "runs"
TASK = OpenTask(1, "permutation 02", 0, {"name": "default", "lr": 0.1})
STATE = {
    "flat": torch.rand(40),
    "mean": torch.rand(3, 4).to(torch.bfloat16),
    "count": torch.tensor(7),
}


def shown(folder: Path) -> tuple[Any, ...]:
    """All that a report is made of."""
    read = read_run(folder)
    selectors = {name: table.tobytes() for name, table in read.selectors.items()}
    return read.config, read.lines, read.matrix.rows, selectors, read.factors


def answers(method: str, stream: Stream, folder: Path) -> tuple[Any, ...]:
    """What a run that is resumed goes on with."""
    own = SeedRun(config_for(stream, method), stream, folder, resume=True)
    own.check()
    x = stream[0].test_x[:8].float().flatten(1)
    return own.lines, [own.method.predict(x, task).tolist() for task in range(3)]


@pytest.mark.parametrize("method", ["rank", "finetune"])
def test_flipped_bit_is_never_taken_for_content(
    method: str, stream: Stream, copied: Callable[[str], Path]
) -> None:
    folder, draw = copied(method), random.Random(0)
    whole, resumed = shown(folder), answers(method, stream, folder)
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    assert len(files) >= 4
    refused = 0
    for file in files:
        content = file.read_bytes()
        for turn in range(60 if file.parent == folder else 20):
            flip_bit(file, draw.randrange(len(content)), draw.randrange(8))
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                try:
                    assert shown(folder) == whole
                except (RankupError, UserWarning):
                    refused += 1
            if turn < 10:
                try:
                    assert answers(method, stream, folder) == resumed
                except RankupError:
                    refused += 1
            file.write_bytes(content)
    assert refused > 100


def test_flipped_bit_of_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TASK, Checkpoint(7, STATE, seconds=2.5))
    path, draw = tmp_path / CHECKPOINT, random.Random(0)
    content = path.read_bytes()
    for position in [*draw.sample(range(len(content)), 200), *range(-100, 0)]:
        flip_bit(path, position, draw.randrange(8))
        notes = list[str]()
        point = read_checkpoint(tmp_path, TASK, notes.append)
        path.write_bytes(content)
        if point is None:
            assert len(notes) == 1
            assert "starts over: " in notes[0]
            assert "\n" not in notes[0]
            continue
        assert (point.epoch, point.seconds, notes) == (7, 2.5, [])
        assert all(torch.equal(point.state[name], STATE[name]) for name in STATE)


def test_zeros_at_the_end_of_a_checkpoint_are_noticed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TASK, Checkpoint(7, STATE))
    content = (tmp_path / CHECKPOINT).read_bytes()
    (tmp_path / CHECKPOINT).write_bytes(content[:-16] + bytes(16))
    notes = list[str]()
    assert read_checkpoint(tmp_path, TASK, notes.append) is None
    assert "does not match its seal" in notes[0]


@pytest.mark.parametrize(
    "other",
    [
        OpenTask(1, "permutation 03", 0, TASK.recipe),
        OpenTask(1, TASK.name, 1, TASK.recipe),
        OpenTask(1, TASK.name, 0, {**TASK.recipe, "lr": 0.2}),
    ],
)
def test_checkpoint_of_something_else_starts_over(other: OpenTask, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TASK, Checkpoint(7, STATE))
    notes = list[str]()
    assert read_checkpoint(tmp_path, other, notes.append) is None
    assert "another task, seed or recipe" in notes[0]


def lines_of(folder: Path) -> list[str]:
    return (folder / "metrics.jsonl").read_text().splitlines(keepends=True)


@pytest.mark.parametrize(
    ("damage", "number"),
    [
        (lambda one, two, three: [one, three, two], 2),
        (lambda one, two, three: [two, three], 1),
        (lambda one, two, three: [one, three], 2),
        (lambda one, two, three: [one, two, three, three], 4),
        (lambda one, two, three: [one, two.replace('"buffer": 0', '"buffer": 1'), three], 2),
        (lambda one, two, three: [one, two.replace('"seal"', '"seam"'), three], 2),
        (lambda one, two, three: [one, two, three[:-1] + "}"], 3),
    ],
)
def test_changed_lines_are_refused(
    damage: Callable[..., list[str]], number: int, copied: Callable[[str], Path]
) -> None:
    folder = copied("rank")
    (folder / "metrics.jsonl").write_text("".join(damage(*lines_of(folder))))
    with pytest.raises(RankupError, match=rf"line {number} of .*metrics.jsonl") as caught:
        read_lines(folder)
    assert "\n" not in str(caught.value)


def test_lines_of_another_run_are_refused(copied: Callable[[str], Path]) -> None:
    folder = copied("rank")
    shutil.copy(copied("finetune") / "metrics.jsonl", folder)
    with pytest.raises(RankupError, match="line 1 of .* does not match its seal"):
        read_lines(folder)


def test_line_cut_off_by_a_crash_is_forgiven(copied: Callable[[str], Path]) -> None:
    folder = copied("rank")
    content = (folder / "metrics.jsonl").read_bytes()
    for left_out in (2, 30, 200):
        (folder / "metrics.jsonl").write_bytes(content[:-left_out])
        assert len(read_lines(folder)) == 2
    (folder / "metrics.jsonl").write_bytes(content[:-1])
    assert len(read_lines(folder)) == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda config: config.pop("sha256"),
        lambda config: config.pop("format"),
        lambda config: config.update(width=17),
        lambda config: config.update(format=1),
        lambda config: [config.update(formaT=config.pop("format")), config.pop("sha256")],
    ],
)
def test_changed_settings_are_refused(
    damage: Callable[[dict[str, Any]], object], copied: Callable[[str], Path], call: Call
) -> None:
    folder = copied("rank")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    damage(config)
    path.write_text(json.dumps(config))
    for command in (("report", folder), ("run", "--resume", "--out", folder), ("verify", folder)):
        done = call(*command)
        assert done.code == 1
        assert f"{path} does not match its seal" in done.err
        assert f"`rankup seal {folder}`" in done.err
        assert done.err.count("\n") == 1


def test_all_settings_of_a_run_are_known() -> None:
    assert {item.name for item in fields(RunConfig)} == records._SETTINGS


def test_settings_of_a_newer_version_are_refused(copied: Callable[[str], Path]) -> None:
    folder = copied("rank")
    content = {**read_config(folder / "config.json"), "format": 3}
    sealed = {**content, "sha256": records.seal(content)}
    (folder / "config.json").write_text(json.dumps(sealed))
    with pytest.raises(RankupError, match="has format 3, .* written by a newer rankup"):
        read_config(folder / "config.json")


def test_run_without_seals_stays_without(tmp_path: Path, call: Call) -> None:
    folder = Path(shutil.copytree(OLD / "stopped-rank", tmp_path / "run"))
    said = call("run", "--resume", "--out", folder)
    assert said.code == 0, said.err
    assert said.err.count("has no seals") == 1
    assert "checkpoint.safetensors was written by version 0.1 and has no seal" in said.err
    assert not is_sealed(folder)
    assert len(read_lines(folder)) == 5
    assert '"seal"' not in (folder / "metrics.jsonl").read_text()
    shown = call("report", folder)
    assert (shown.code, shown.err.count("has no seals")) == (0, 1)


def test_seals_in_a_run_without_are_refused(tmp_path: Path) -> None:
    folder = write_old_run(tmp_path / "run", constant(2))
    lines = [json.loads(line) | {"seal": None} for line in lines_of(folder)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with pytest.raises(RankupError, match="line 1 of .* does not match its seal"):
        read_lines(folder)


def test_edited_run_is_sealed_again(copied: Callable[[str], Path], call: Call) -> None:
    folder = copied("rank")
    path, metrics = folder / "config.json", folder / "metrics.jsonl"
    path.write_text(path.read_text().replace('"threads": ', '"threads": 1'))
    metrics.write_text(metrics.read_text().replace('"buffer": 0', '"buffer": 1'))
    assert call("report", folder).code == 1
    done = call("seal", folder)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"sealed {path} and 3 lines of {metrics} as they are\n"
    assert read_lines(folder)[0]["buffer"] == 1
    assert call("verify", folder).code == 0


def test_run_without_seals_gets_them(tmp_path: Path, call: Call) -> None:
    folder = write_old_run(tmp_path / "run", constant(2))
    before = read_config(folder / "config.json"), read_lines(folder)
    assert call("seal", folder).code == 0
    assert is_sealed(folder)
    assert (read_config(folder / "config.json"), read_lines(folder)) == before


def test_only_what_has_seals_is_sealed(tmp_path: Path, call: Call) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for path, words in (
        (tmp_path, "is not a run folder: it has no config.json"),
        (tmp_path / "none", "is not a run folder"),
        (tmp_path / "notes.txt", "is neither a run folder nor a file of settings"),
    ):
        done = call("seal", path)
        assert done.code == 1
        assert words in done.err
    write_old_run(tmp_path / "run", constant(2), colour="red")
    assert "has a setting 'colour', which no run has" in call("seal", tmp_path / "run").err


def damaged(folder: Path, name: str) -> None:
    """Flip a bit in the content of a file."""
    path = next(folder.glob(name))
    content = path.read_bytes()
    position = content.index(b'"width": ') + 9 if name == "config.json" else len(content) // 2
    flip_bit(path, position)


@pytest.mark.parametrize(
    ("method", "file"),
    [
        *(("rank", name) for name in ("config.json", "metrics.jsonl", CHECKPOINT)),
        *(("rank", name) for name in ("net/manifest.json", "net/tasks/permutation_02*")),
        *(("finetune", name) for name in ("config.json", "net/manifest.json", "net/weights*")),
    ],
)
def test_verify_finds_every_damaged_file(
    method: str, file: str, copied: Callable[[str], Path], call: Call
) -> None:
    folder = copied(method)
    write_checkpoint(folder, TASK, Checkpoint(7, STATE))
    whole = call("verify", folder.parent)
    assert (whole.code, whole.err) == (0, "")
    assert f"{folder} is whole: 3 tasks, every file as it was written\n" in whole.out
    damaged(folder, file)
    for path in (folder, folder.parent):
        done = call("verify", path)
        assert (done.code, done.err.count("\n")) == (1, 1)
        assert Path(file).name.split("*")[0] in done.err


def test_verify_tells_of_lost_networks(copied: Callable[[str], Path], call: Call) -> None:
    for method in ("rank", "finetune"):
        folder = copied(method)
        shutil.rmtree(folder / "net")
        assert f"{folder / 'net'} holds nothing, but" in call("verify", folder).err


def test_verify_takes_runs_of_version_1(call: Call) -> None:
    done = call("verify", OLD)
    assert done.code == 0, done.err
    assert done.out.count("as far as can be told without seals\n") == 19


PLACES = ("config.json", "metrics.jsonl", CHECKPOINT)


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("kind", ["pipe", "device", "link", "sparse", "folder"])
def test_no_file_can_hang_a_run(
    name: str, kind: str, copied: Callable[[str], Path], stream: Stream, call: Call
) -> None:
    folder, started = copied("rank"), time.perf_counter()
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link":
        path.symlink_to(path.name)
    elif kind == "folder":
        path.mkdir()
    else:
        with open(path, "wb") as file:
            file.truncate(6 << 30)
    commands = [("verify", folder)]
    commands += [("report", folder)] if name != CHECKPOINT else []
    for command in commands:
        done = call(*command)
        assert done.code == 1
        assert name in done.err
        assert done.err.count("\n") == 1
    if name == CHECKPOINT:
        notes = list[str]()
        assert read_checkpoint(folder, TASK, notes.append) is None
        assert len(notes) == 1
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize("method", ["rank", "finetune", "parallel"])
def test_lost_end_of_metrics_is_found(
    method: str, copied: Callable[[str], Path], call: Call
) -> None:
    path = copied(method) / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for last in (b"", lines[-1][:-20], lines[-1][:20] + bytes(100)):
        path.write_bytes(b"".join(lines[:-1]) + last)
        assert len(read_lines(path.parent)) == 2  # as if killed before it was written
        for command in ("report", "verify"):
            done = call(command, path.parent)
            assert done.code == 0
            assert "has learned 3 tasks, of which metrics.jsonl lists 2: unless a" in done.err
            assert done.err.count("\n") == 1
    for left in range(len(lines) - 1):
        path.write_bytes(b"".join(lines[:left]))
        with pytest.raises(RankupError, match=f"lacks tasks that net/ has .it lists {left} of"):
            read_lines(path.parent)


@pytest.mark.parametrize("method", ["rank", "finetune"])
def test_network_of_an_earlier_time_is_found(
    method: str, stream: Stream, copied: Callable[[str], Path], call: Call
) -> None:
    folder = copied(method)
    before = folder.with_name("before")
    run(config_for(stream, method), stream.first(1), before)
    shutil.rmtree(folder / "net")
    shutil.copytree(before / "net", folder / "net")
    done = call("verify", folder)
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "net lacks tasks that metrics.jsonl has (it holds 1 of 3): put back" in done.err


def test_more_tasks_saved_meanwhile_are_no_damage(
    copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied("rank")
    manifest, metrics, own = folder / "net/manifest.json", folder / "metrics.jsonl", raw_lines
    now = manifest.read_bytes()
    metrics.write_text(lines_of(folder)[0])
    manifest.write_text(json.dumps({"tasks": ["first", "second"]}))

    def read_slowly(path: Path) -> list[dict[str, Any]]:
        lines = own(path)
        manifest.write_bytes(now)  # of three tasks
        return lines

    monkeypatch.setattr(records, "raw_lines", read_slowly)
    assert len(read_lines(folder)) == 1

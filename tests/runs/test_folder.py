"""Run folders in which a run may begin or resume, and the message where it may not."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import filelock
import pytest

import rankup
from helpers.damage import edit_config
from helpers.runs import config_for, outcome
from rankup.data.streams import Stream
from rankup.errors import RankupError, StoreError
from rankup.runs.folder import write_config, write_configs
from rankup.runs.records import read_lines
from rankup.runs.run import run, run_together
from rankup.runs.seed_run import SeedRun


@pytest.mark.parametrize("method", ["er-ring", "rank", "parallel"])
def test_network_that_lacks_tasks_is_refused(method: str, stream: Stream, tmp_path: Path) -> None:
    out, config = tmp_path / "run", config_for(stream, method)
    run(config, stream.first(2), out)
    before = (out / "metrics.jsonl").read_bytes()
    shutil.rmtree(out / "net")
    with pytest.raises(
        RankupError, match="net lacks tasks that metrics.jsonl has .it holds 0 of 2"
    ):
        run(config, stream, out, resume=True)
    assert (out / "metrics.jsonl").read_bytes() == before
    assert not (out / "net").exists()


@pytest.mark.parametrize("tasks", [2, 3])
def test_foreign_task_in_the_network_is_refused(tasks: int, stream: Stream, tmp_path: Path) -> None:
    out, config = tmp_path / "run", config_for(stream, "rank")
    run(config, stream.first(tasks), out)
    net = rankup.load(out / "net")
    net.begin_task("mine", 10)
    net.commit_task()
    rankup.save(net, out / "net")
    there = "'permutation 03'" if tasks == 2 else "no more"
    with pytest.raises(StoreError, match=f"a task 'mine' where the stream has {there}: begin"):
        run(config, stream, out, resume=True)
    assert len(read_lines(out)) == tasks


def test_loading_a_run_folder_names_its_network(learned: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no network in .*rank: .*; there is one in .*rank/net"):
        rankup.load(learned / "rank")
    with pytest.raises(StoreError, match=r"it has no manifest.json$"):
        rankup.load(tmp_path)


def test_lost_lines_are_refused(stream: Stream, copied: Callable[[str], Path]) -> None:
    out, config = copied("finetune"), config_for(stream, "finetune")
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text(lines[0])
    with pytest.raises(RankupError, match="lacks tasks that net/ has .it lists 1 of 3.: put"):
        run(config, stream, out, resume=True)


@pytest.mark.parametrize("method", ["rank", "finetune"])
def test_truncated_last_line_is_written_again(
    method: str, stream: Stream, copied: Callable[[str], Path]
) -> None:
    out, config = copied(method), config_for(stream, method)
    whole = outcome(out)
    content = (out / "metrics.jsonl").read_bytes()
    (out / "metrics.jsonl").write_bytes(content[:-20])
    assert len(read_lines(out)) == 2
    run(config, stream, out, resume=True)
    assert outcome(out) == whole


def test_broken_line_is_reported(stream: Stream, copied: Callable[[str], Path]) -> None:
    out, config = copied("finetune"), config_for(stream, "finetune")
    (out / "metrics.jsonl").write_text("{\n" + (out / "metrics.jsonl").read_text())
    with pytest.raises(RankupError, match="line 1 of .* is broken: it is not a JSON object"):
        run(config, stream, out, resume=True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: os.truncate(path, 100), "safetensors is truncated: 100 of .* bytes are left"),
        (lambda path: path.unlink(), "weights-0003.safetensors is missing"),
        (
            lambda path: (path.unlink(), path.mkdir()),
            "weights-0003.safetensors cannot be read: it is a folder",
        ),
        (
            lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
            "is not the file that was saved: its SHA-256 has changed",
        ),
    ],
)
def test_broken_weights_are_reported(
    damage: Callable[[Path], object],
    message: str,
    stream: Stream,
    copied: Callable[[str], Path],
) -> None:
    out, config = copied("finetune"), config_for(stream, "finetune")
    damage(out / "net" / "weights-0003.safetensors")
    with pytest.raises(StoreError, match=message) as caught:
        run(config, stream, out, resume=True)
    assert "\n" not in str(caught.value)


def test_differing_setting_is_named(stream: Stream, learned: Path) -> None:
    out, config = learned / "rank", config_for(stream)
    for other, message in (
        (
            config_for(stream, lr=0.5),
            "was started with lr 0.01, not 0.5: continue with the same options",
        ),
        (
            replace(config, recipe=config.recipe | {"name": "paper"}),
            "with recipe default, not paper",
        ),
        (replace(config, options={"reuse": False}), "with reuse left out, not False: continue"),
        (replace(config, rank="4,1"), "with rank 3,1, not 4,1: continue"),
        (
            replace(config, task_names=["permutation 01", "other", "permutation 03"]),
            "with task_names 2 permutation 02, not other: continue",
        ),
    ):
        with pytest.raises(RankupError, match=message) as caught:
            run(other, stream, out, resume=True)
        assert len(str(caught.value)) < 120 + len(str(out))


def test_locked_folder_is_left_alone(stream: Stream, tmp_path: Path) -> None:
    out = tmp_path / "run"
    write_config(config_for(stream.first(2)), out)
    before = (out / "config.json").read_bytes()
    with (
        filelock.FileLock(out / ".lock"),
        pytest.raises(RankupError, match="another process is using"),
    ):
        run(config_for(stream), stream, out, resume=True)
    assert (out / "config.json").read_bytes() == before


def test_one_locked_folder_leaves_all_alone(stream: Stream, tmp_path: Path) -> None:
    fewer, folders = stream.first(2), [tmp_path / "0", tmp_path / "1"]
    for out in folders:
        write_config(config_for(fewer), out)
    before = [(out / "config.json").read_bytes() for out in folders]
    grown = dict.fromkeys(folders, config_for(stream))
    with (
        filelock.FileLock(folders[1] / ".lock"),
        pytest.raises(RankupError, match="another process is using .*1: wait"),
    ):
        write_configs(grown)
    assert [(out / "config.json").read_bytes() for out in folders] == before
    write_configs(grown)
    assert [json.loads((out / "config.json").read_text())["tasks"] for out in folders] == [3, 3]


def test_folder_that_changed_meanwhile_is_refused(stream: Stream, tmp_path: Path) -> None:
    out, config = tmp_path / "run", config_for(stream)
    run(config, stream.first(1), out)
    outdated = SeedRun(config, stream, out, resume=True)
    outdated.check()
    run(config, stream, out, resume=True)
    with pytest.raises(RankupError, match="another process was using .* until just now"):
        run_together([outdated])
    assert len(read_lines(out)) == 3


def test_damaged_task_names_are_reported(stream: Stream, copied: Callable[[str], Path]) -> None:
    out, config = copied("rank"), config_for(stream)
    edit_config(out, task_names=None)
    with pytest.raises(RankupError, match="was started with task_names left out, not"):
        run(config, stream, out, resume=True)


def test_refused_run_leaves_no_folder(stream: Stream, tmp_path: Path) -> None:
    with pytest.raises(RankupError, match="images of 8×8 pixels .* by 0 to 7 pixels, got 9"):
        run(config_for(stream, crop=9), stream, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_file_in_place_of_a_folder_is_refused(stream: Stream, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for resume in (False, True):
        with pytest.raises(RankupError, match="file is a file, not a folder: name a folder with"):
            run(config_for(stream), stream, tmp_path / "file", resume=resume)
    assert (tmp_path / "file").read_text() == "mine"


def test_lock_that_is_no_file_is_refused(stream: Stream, tmp_path: Path) -> None:
    (tmp_path / ".lock").symlink_to("/dev/zero")
    with pytest.raises(RankupError, match="cannot be locked: .*; remove .*lock if it is no file"):
        run(config_for(stream), stream, tmp_path)

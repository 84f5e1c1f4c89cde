"""What a run folder may hold for a run to begin or resume, and the message if it may not."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import filelock
import pytest

import rankup
from helpers.runs import config_for, outcome
from rankup.data.streams import Stream, make_stream
from rankup.errors import RankupError, StoreError
from rankup.runs.folder import write_config, write_configs
from rankup.runs.records import read_lines
from rankup.runs.run import SeedRun, run, run_together


@pytest.fixture(scope="module")
def stream() -> Stream:
    return make_stream("p-digits", tasks=3)


@pytest.mark.parametrize("method", ["er-ring", "rank", "parallel"])
def test_a_network_that_lacks_tasks_is_not_gone_on_with(
    method: str, stream: Stream, tmp_path: Path
) -> None:
    out, config = tmp_path / "run", config_for(stream, method)
    run(replace(config, tasks=3), Stream(stream.name, stream.tasks[:2]), out)
    before = (out / "metrics.jsonl").read_bytes()
    shutil.rmtree(out / "net")
    with pytest.raises(
        RankupError, match="net lacks tasks that metrics.jsonl has .it holds 0 of 2"
    ):
        run(config, stream, out, resume=True)
    assert (out / "metrics.jsonl").read_bytes() == before
    assert not (out / "net").exists()


@pytest.mark.parametrize("learned", [2, 3])
def test_a_task_that_somebody_taught_the_network_is_none_of_the_streams(
    learned: int, stream: Stream, tmp_path: Path
) -> None:
    out, config = tmp_path / "run", config_for(stream, "rank")
    run(replace(config, tasks=3), Stream(stream.name, stream.tasks[:learned]), out)
    net = rankup.load(out / "net")
    net.begin_task("mine", 10)
    net.commit_task()
    rankup.save(net, out / "net")
    there = "'permutation 03'" if learned == 2 else "no more"
    with pytest.raises(StoreError, match=f"a task 'mine' where the stream has {there}: begin"):
        run(config, stream, out, resume=True)
    assert len(read_lines(out)) == learned


def test_a_runs_folder_is_no_networks_but_has_one(stream: Stream, tmp_path: Path) -> None:
    run(config_for(stream, "rank"), stream, tmp_path / "run")
    with pytest.raises(StoreError, match=r"no network in .*run: .*; there is one in .*run/net"):
        rankup.load(tmp_path / "run")
    with pytest.raises(StoreError, match=r"it has no manifest.json$"):
        rankup.load(tmp_path)


def test_lines_that_are_lost_are_not_made_up(stream: Stream, tmp_path: Path) -> None:
    out, config = tmp_path / "run", config_for(stream, "finetune")
    run(config, stream, out)
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text(lines[0])
    with pytest.raises(RankupError, match="lacks tasks that net/ has .it lists 1 of 3.: put"):
        run(config, stream, out, resume=True)


@pytest.mark.parametrize("method", ["rank", "finetune"])
def test_a_last_line_that_was_cut_off_is_written_again(
    method: str, stream: Stream, tmp_path: Path
) -> None:
    out, config = tmp_path / "run", config_for(stream, method)
    run(config, stream, out)
    whole = outcome(out)
    content = (out / "metrics.jsonl").read_bytes()
    (out / "metrics.jsonl").write_bytes(content[:-20])
    assert len(read_lines(out)) == 2
    run(config, stream, out, resume=True)
    assert outcome(out) == whole


def test_a_line_that_is_broken_is_said(stream: Stream, tmp_path: Path) -> None:
    out, config = tmp_path / "run", config_for(stream, "finetune")
    run(config, stream, out)
    (out / "metrics.jsonl").write_text("{\n" + (out / "metrics.jsonl").read_text())
    with pytest.raises(RankupError, match="line 1 of .* is broken: it is not a JSON object"):
        run(config, stream, out, resume=True)


def replaced(path: Path, name: str, tensor: object) -> None:
    """Replace a tensor in a file, or remove it."""
    import safetensors.torch

    tensors = safetensors.torch.load(path.read_bytes())
    del tensors[name]
    path.write_bytes(
        safetensors.torch.save(tensors | ({name: tensor} if tensor is not None else {}))
    )


WEIGHT = "shared/hidden.0.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: os.truncate(path, 100), "safetensors is truncated or not a safetensors file"),
        (lambda path: os.truncate(path, 0), "safetensors is truncated or not a safetensors file"),
        (
            lambda path: (path.unlink(), path.mkdir()),
            "weights.safetensors cannot be read: Is a dir",
        ),
        (lambda path: replaced(path, WEIGHT, None), "does not hold what this method, network and"),
        (
            lambda path: replaced(path, WEIGHT, rankup.models.mlp(3, hidden=[2]).hidden[0].weight),
            "does not hold what this method, network and stream need",
        ),
    ],
)
def test_broken_weights_are_said(
    damage: object, message: str, stream: Stream, tmp_path: Path
) -> None:
    out, config = tmp_path / "run", config_for(stream, "finetune")
    run(replace(config, tasks=3), Stream(stream.name, stream.tasks[:1]), out)
    damage(out / "net" / "weights.safetensors")
    with pytest.raises(StoreError, match=message) as caught:
        run(config, stream, out, resume=True)
    assert "\n" not in str(caught.value)


def test_what_differs_is_named(stream: Stream, tmp_path: Path) -> None:
    out, config = tmp_path / "run", config_for(stream)
    run(config, stream, out)
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


def test_a_folder_in_which_another_process_works_is_left_as_it_is(
    stream: Stream, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    first = Stream(stream.name, stream.tasks[:2])
    run(config_for(first), first, out)
    before = (out / "config.json").read_bytes()
    with (
        filelock.FileLock(out / ".lock"),
        pytest.raises(RankupError, match="another process is using"),
    ):
        run(config_for(stream), stream, out, resume=True)
    assert (out / "config.json").read_bytes() == before


def test_where_another_process_works_in_one_folder_all_are_left_as_they_are(
    stream: Stream, tmp_path: Path
) -> None:
    fewer, folders = Stream(stream.name, stream.tasks[:2]), [tmp_path / "0", tmp_path / "1"]
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


def test_a_folder_in_which_another_process_has_worked_is_not_gone_on_with(
    stream: Stream, tmp_path: Path
) -> None:
    out, config = tmp_path / "run", config_for(stream)
    run(replace(config, tasks=3), Stream(stream.name, stream.tasks[:1]), out)
    outdated = SeedRun(config, stream, out, resume=True)
    outdated.check()
    run(config, stream, out, resume=True)
    with pytest.raises(RankupError, match="another process was using .* until just now"):
        run_together([outdated])
    assert len(read_lines(out)) == 3


def test_tasks_that_are_no_list_are_said(stream: Stream, tmp_path: Path) -> None:
    out, config = tmp_path / "run", config_for(stream)
    run(config, stream, out)
    stored = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(stored | {"task_names": None}))
    with pytest.raises(RankupError, match="was started with task_names left out, not"):
        run(config, stream, out, resume=True)


def test_what_is_refused_leaves_no_folder(stream: Stream, tmp_path: Path) -> None:
    with pytest.raises(RankupError, match="images of 8×8 pixels .* by 0 to 7 pixels, got 9"):
        run(config_for(stream, crop=9), stream, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    run(config_for(stream), stream, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["recipe"]["crop"] == 0


def test_a_file_is_no_folder(stream: Stream, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for resume in (False, True):
        with pytest.raises(RankupError, match="file is a file, not a folder: name a folder with"):
            run(config_for(stream), stream, tmp_path / "file", resume=resume)
    assert (tmp_path / "file").read_text() == "mine"

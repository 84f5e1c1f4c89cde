"""Run folders read back: intact parts are shown, broken ones reported."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rankup
from helpers.damage import flip_bit
from helpers.reports import constant, write_net, write_old_run, write_run
from rankup.errors import RankupError
from rankup.rank import Rank
from rankup.runs.read import read_run
from rankup.runs.records import runs_in

FIRST = "net/tasks/permutation_01-68172148.safetensors"
SECOND = "net/tasks/permutation_02-9f6c8e30.safetensors"


@pytest.mark.parametrize("store", ["full", "float16", "int8"])
def test_selectors_of_a_saved_network(store: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", constant(3))
    net = rankup.grow(rankup.models.mlp(9, hidden=[8, 7]), Rank(3, 0, seeded=5), store=store)
    for task in ("a", "b", "c", "d"):  # the last one's line is not written yet
        net.begin_task(task, classes=2)
        net.commit_task()
    rankup.save(net, run / "net")
    read = read_run(run)
    assert read.factors == {"hidden.0": [5, 3, 0, 0], "hidden.1": [5, 3, 0, 0]}
    for index, layer in enumerate(net.body.hidden):
        stored = read.selectors[f"hidden.{index}"]
        np.testing.assert_array_equal(stored, layer.S[:3].numpy().astype(np.float64))


def test_truncated_last_line_is_ignored(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", constant(3))
    metrics = run / "metrics.jsonl"
    content = metrics.read_text()
    metrics.write_text(content[:-40])
    assert len(read_run(run).lines) == 2
    metrics.write_text(content.rstrip("\n"))
    assert len(read_run(run).lines) == 3


def broken(run: Path, line: int, **changes: object) -> None:
    """Change a line of a run's metrics."""
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    lines[line - 1] = json.dumps({**json.loads(lines[line - 1]), **changes})
    metrics.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: shutil.rmtree(run), "there is no run folder .*run$"),
        (lambda run: (run / "config.json").unlink(), "run is not a run folder: it has no config"),
        (lambda run: (run / "config.json").write_text("{"), "config.json is truncated or edited"),
        (lambda run: (run / "config.json").write_text("[]"), "it has no 'stream'$"),
        (lambda run: (run / "config.json").write_text('{"stream": ""}'), "it has no 'method'$"),
        (lambda run: (run / "metrics.jsonl").unlink(), "nothing has been learned yet in .*run"),
        (lambda run: (run / "metrics.jsonl").write_text('{"ta'), "nothing has been learned yet"),
        (lambda run: (run / "metrics.jsonl").write_bytes(b"\xff\n"), "line 1 .* a JSON object$"),
        (lambda run: (run / "metrics.jsonl").write_text("3\n"), "line 1 of .* not a JSON object$"),
        (lambda run: (run / "metrics.jsonl").write_text('{"task": ""}\n'), "no 'accuracy'$"),
        (lambda run: broken(run, 2, accuracy=[0.5]), "line 2 of .* is broken: .* 2 tasks"),
        (lambda run: broken(run, 2, accuracy=[0.5, 97]), "line 2 of .* between 0 and 1, got 97$"),
        (lambda run: broken(run, 3, seconds="1"), "line 3 of .*: 'seconds' is '1', not a number$"),
    ],
)
def test_broken_run_folder_is_reported(tmp_path: Path, damage: Any, message: str) -> None:
    run = write_old_run(tmp_path / "run", constant(3))
    write_net(run / "net", tasks=3)
    damage(run)
    with pytest.raises(RankupError, match=message) as caught:
        read_run(run)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: (run / "net/manifest.json").write_text("{}"), "is not the manifest of a"),
        (lambda run: (run / FIRST).write_bytes(b"no"), "is truncated: 2 of"),
        (lambda run: (run / FIRST).unlink(), "safetensors is missing; "),
        (lambda run: flip_bit(run / FIRST, -40), "is not the file that was saved: its SHA-256"),
        (
            lambda run: shutil.copy(run / SECOND, run / FIRST),
            "is truncated: .*; the run is shown without",
        ),
    ],
)
def test_damaged_network_has_no_selectors(tmp_path: Path, damage: Any, message: str) -> None:
    run = write_run(tmp_path / "run", constant(3))
    write_net(run / "net", tasks=3)
    damage(run)
    with pytest.warns(UserWarning, match=message):
        read = read_run(run)
    assert len(read.lines) == 3
    assert not read.selectors
    assert not read_run(run, selectors=False).selectors  # and nothing is said


def test_unreadable_file_is_not_called_missing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", constant(3))
    write_net(run / "net", tasks=3)
    (run / FIRST).unlink()
    (run / FIRST).mkdir()
    with pytest.warns(UserWarning, match=f"{FIRST} cannot be read: it is a folder, "):
        read_run(run)


def test_seeds_are_in_numerical_order(tmp_path: Path) -> None:
    for seed in (10, 2, 1):
        (tmp_path / f"seed-{seed}").mkdir()
        (tmp_path / f"seed-{seed}" / "config.json").touch()
    assert [run.name for run in runs_in(tmp_path)] == ["seed-1", "seed-2", "seed-10"]

"""Folders that have since been locked, edited or taught more: reported in a sentence that names the
file, and never counted silently."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from helpers.calling import Call
from helpers.own_images import own_images
from rankup.errors import RankupError
from rankup.paper.experiment import Experiment
from rankup.paper.results import Results
from rankup.paper.timings import read_timings
from rankup.report.comparison.text import summary
from rankup.runs.comparison import read_comparison, read_index
from rankup.runs.seal import seal_again

EXPERIMENT = Experiment.of("p-mnist", epochs=5, tasks=2)
RUN = {
    "seed": 0,
    "config": {"versions": {"torch": "2.13.0"}},
    "accuracy": [[0.9], [0.9, 0.8]],
    "parameters": 10.0,
    "buffer": 0.0,
    "seconds": 1.5,
    "date": "2026-11-17",
    "machine": "one",
    "command": "rankup paper rank",
    "failed": "",
}


def write_results(root: Path, *runs: dict[str, Any], of: Experiment = EXPERIMENT) -> Results:
    results = Results(root)
    results.path(EXPERIMENT).parent.mkdir(parents=True, exist_ok=True)
    results.path(EXPERIMENT).write_text(json.dumps({"known": of.known(), "runs": runs}))
    return results


def test_results_of_something_else_are_refused(tmp_path: Path) -> None:
    other = Experiment.of("p-mnist", "supsup", epochs=5, tasks=2)
    with pytest.raises(RankupError, match="is not a results file"):
        write_results(tmp_path, RUN, of=other).of(EXPERIMENT)


def test_results_are_read(tmp_path: Path) -> None:
    assert write_results(tmp_path, RUN).missing(EXPERIMENT) == [1, 2, 3, 4]
    assert write_results(tmp_path, RUN | {"failed": "diverged", "accuracy": []}).failures(
        EXPERIMENT
    )


@pytest.mark.parametrize(
    "damage",
    [
        {"seed": "0"},
        {"seed": [0]},
        {"accuracy": None},
        {"accuracy": [[0.9], [0.9]]},
        {"accuracy": [[0.9], [0.9, 2.0]]},
        {"seconds": None},
        {"seconds": float("inf")},
        {"config": None},
        {"config": {"versions": ["2.13.0"]}},
        {"parameters": 10**400},
        {"date": 5},
        {"machine": ["one"]},
    ],
)
def test_damaged_results_are_named(tmp_path: Path, damage: dict[str, Any]) -> None:
    results = write_results(tmp_path, RUN | damage)
    with pytest.raises(RankupError, match=r"rank-.*\.json is not a results file: remove it"):
        results.missing(EXPERIMENT)


@pytest.mark.parametrize("other", [{}, {"seed": 1, "accuracy": [[0.9]]}])
def test_seed_counts_once_and_with_all_its_tasks(tmp_path: Path, other: dict[str, Any]) -> None:
    with pytest.raises(RankupError, match="is not a results file"):
        write_results(tmp_path, RUN, RUN | other).of(EXPERIMENT)


def test_results_that_cannot_be_read_are_not_to_be_removed(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.path(EXPERIMENT).mkdir(parents=True)  # fails like a broken disk
    with pytest.raises(RankupError, match=r"rank-.*\.json cannot be read"):
        results.missing(EXPERIMENT)


@pytest.mark.parametrize(
    "damage",
    [{"seconds": None}, {"cells": None}, {"cells": [[1]]}, {"machine": [1]}, {"begun": 5}],
)
def test_damaged_pieces_are_named(tmp_path: Path, damage: dict[str, Any]) -> None:
    piece = {"begun": "2026-01-01", "machine": "one", "torch": "2", "command": "rankup paper"}
    (tmp_path / "pieces").mkdir()
    (tmp_path / "pieces" / "a.json").write_text(json.dumps(piece))
    assert len(read_timings(tmp_path)) == 1  # a date without a zone is in UTC
    (tmp_path / "pieces" / "b.json").write_text(json.dumps(piece | damage))
    with pytest.raises(RankupError, match=r"b\.json does not say how long a piece took"):
        read_timings(tmp_path)


def compared(out: Path, call: Call, seeds: int = 1) -> Path:
    options = ("--methods", "rank,finetune", "--seeds", seeds, "--tasks", 2, "--epochs", 2)
    assert call("compare", *options, "--out", out).code == 0
    return out


@pytest.mark.slow
def test_run_that_was_taught_more_is_left_out(tmp_path: Path, call: Call) -> None:
    """Its mean is one over other tasks."""
    own = compared(tmp_path / "c", call, seeds=2)
    assert call("run", "--resume", "--out", str(own / "rank" / "seed-0"), "--tasks", "3").code == 0
    found = read_comparison(own)
    assert [len(entry.runs) for entry in found.entries] == [1, 2]
    assert "2 seeds or fewer" in summary(found)
    assert call("report", str(own)).code == 0


def test_damaged_comparison_is_refused(tmp_path: Path, call: Call) -> None:
    folder = compared(tmp_path / "c", call)
    index = json.loads((folder / "compare.json").read_text())
    for seeds in ["a"], [[0]], [0, 0], [True]:
        (folder / "compare.json").write_text(json.dumps(index | {"seeds": seeds}))
        with pytest.raises(RankupError, match="compare.json does not match its seal"):
            read_index(folder)
        seal_again(folder)
        with pytest.raises(RankupError, match="truncated or edited"):
            read_index(folder)
    (folder / "compare.json").write_text(json.dumps(index))
    config = folder / "rank" / "seed-0" / "config.json"
    config.unlink()
    config.symlink_to("nowhere")  # its run would be missing from the table
    with pytest.raises(RankupError, match="config.json .*"):
        read_comparison(folder)


def test_run_that_took_for_ever_is_broken(tmp_path: Path, call: Call) -> None:
    old = Path(__file__).parents[1] / "version-0.1" / "runs" / "rank"
    own, value = shutil.copytree(old, tmp_path / "run"), float("inf")
    lines = [json.loads(line) for line in (own / "metrics.jsonl").read_text().splitlines()]
    lines[0]["seconds"] = value
    (own / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    done = call("report", str(own))
    assert done.code == 1
    assert "line 1 of" in done.err


def test_what_nobody_can_use_is_said(tmp_path: Path, call: Call) -> None:
    (tmp_path / "file").write_text("")
    done = call("compare", "--methods", "rank", "--out", str(tmp_path / "file"))
    assert "is a file, not a folder" in done.err
    many = call("run", "--threads", "100000", "--out", str(tmp_path / "a"))
    assert many.code == 2
    home = call("run", "--stream", "split:~nobodyhere/x", "--tasks", "2")
    assert home.err.startswith("rankup: ")
    assert "Traceback" not in home.err
    large = call("run", "--tasks", "1", "--selectors", "1e300", "--out", str(tmp_path / "b"))
    assert "selectors must be 'previous', 'halfway' or a number" in large.err


@pytest.mark.usefixtures("no_plots")
def test_teacher_of_another_stream_is_refused(tmp_path: Path, call: Call) -> None:
    """Whose tasks have the same names and as many classes."""
    photos, teacher, out = own_images(tmp_path / "photos"), tmp_path / "teacher", tmp_path / "out"
    how = ("--tasks", "2", "--epochs", "40")
    small = call("run", "--stream", f"split:{photos}", *how, "--out", str(teacher))
    assert small.code == 0, small.err
    given = ("--teacher", str(teacher), "--out", str(out))
    done = call("run", "--stream", f"split:{photos}@12", *how, *given)
    assert done.code == 1
    assert "learned a different stream: it cannot answer inputs of shape" in done.err
    assert not out.exists()


@pytest.mark.skipif(os.name != "posix", reason="pipes are of POSIX")
def test_pipe_among_images_is_not_waited_for(tmp_path: Path) -> None:
    from rankup.data.folders import _images

    (tmp_path / "a.png").write_bytes(b"")
    os.mkfifo(tmp_path / "b.png")
    (tmp_path / "c.png").symlink_to(tmp_path / "nowhere")
    assert [image.name for image in _images(tmp_path)] == ["a.png", "c.png"]

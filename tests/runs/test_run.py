"""A run folder holds all that is needed to resume, and resuming changes nothing."""

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rankup
from helpers.runs import config_for, outcome
from rankup.data.streams import Stream
from rankup.rank import parse_rank
from rankup.runs.checkpoints import read_checkpoint, write_checkpoint
from rankup.runs.folder import RunError, check_folder, tasks_more, write_config
from rankup.runs.read import read_run
from rankup.runs.records import read_lines
from rankup.runs.run import run
from rankup.runs.seed_run import Progress, SeedRun
from rankup.training.loop import TaskFailed


@pytest.fixture(scope="module")
def whole(stream: Stream, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run, only to be read."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run(config_for(stream), stream, out)
    return out


def test_run_writes_what_the_report_reads(whole: Path) -> None:
    lines = read_lines(whole)
    assert [set(line) for line in lines] == [
        {"task", "classes", "accuracy", "average_accuracy", "forgetting"}
        | {"parameters", "buffer", "seconds"}
    ] * 3
    assert lines[0]["classes"] == [str(digit) for digit in range(10)]
    assert [len(line["accuracy"]) for line in lines] == [1, 2, 3]
    assert all(line["forgetting"] == 0 for line in lines)
    assert all(0 <= value <= 1 for line in lines for value in line["accuracy"])
    assert lines[-1]["average_accuracy"] == pytest.approx(sum(lines[-1]["accuracy"]) / 3)
    assert rankup.verify(whole / "net")
    assert rankup.load(whole / "net").size().total == lines[-1]["parameters"]
    assert not (whole / "checkpoint.safetensors").exists()
    assert list(read_run(whole).selectors) == ["hidden.0", "hidden.1"]
    config = json.loads((whole / "config.json").read_text())
    assert config["recipe"]["epochs"] == 2
    assert config["threads"] == torch.get_num_threads()


def test_same_config_gives_same_run(stream: Stream, whole: Path, tmp_path: Path) -> None:
    run(config_for(stream), stream, tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(whole)


def test_existing_folder_is_refused(stream: Stream, whole: Path, tmp_path: Path) -> None:
    config, before = config_for(stream), outcome(whole)
    with pytest.raises(rankup.RankupError, match="already holds a run: add --resume"):
        run(config, stream, whole)
    with pytest.raises(rankup.RankupError, match="was started with lr .* continue with the same"):
        run(config_for(stream, lr=0.5), stream, whole, resume=True)
    run(config, stream, whole, resume=True)
    assert outcome(whole) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("text")
    with pytest.raises(rankup.RankupError, match="holds other files"):
        run(config, stream, tmp_path / "mine")
    with pytest.raises(rankup.RankupError, match="cannot write to"):
        run(config, stream, tmp_path / "mine" / "thesis.tex" / "run")


def test_leftovers_of_a_kill_do_not_block_a_new_run(stream: Stream, tmp_path: Path) -> None:
    first = stream.first(1)
    (tmp_path / ".config.json.tmp").write_bytes(b"{")  # as write_file leaves it
    run(config_for(first), first, tmp_path)
    assert len(read_lines(tmp_path)) == 1
    assert not list(tmp_path.glob(".*.tmp"))


def test_failed_task_stops_the_run_and_keeps_earlier_ones(stream: Stream, tmp_path: Path) -> None:
    bad = replace(stream[1], train_x=torch.zeros_like(stream[1].train_x))
    broken = Stream("p-digits", (stream[0], bad))
    with pytest.raises(TaskFailed, match="task 'permutation 02' was not learned"):
        run(config_for(broken), broken, tmp_path / "run")
    assert len(read_lines(tmp_path / "run")) == 1
    assert rankup.load(tmp_path / "run" / "net").tasks == ["permutation 01"]


@pytest.mark.parametrize(
    ("rank", "seeded"), [("11", None), ("a,b", None), ("1,1", "lots"), ("1,1,1", None)]
)
def test_unreadable_rank_is_refused(rank: str, seeded: str | None) -> None:
    with pytest.raises(rankup.RankupError, match="rank must be written like 11,1 or 0.1,0.02"):
        parse_rank(rank, seeded)


@pytest.mark.parametrize("method", ["rank", "finetune"])
def test_run_killed_in_its_first_save_resumes(method: str, stream: Stream, tmp_path: Path) -> None:
    first = stream.first(1)
    config, killed = config_for(first, method), tmp_path / "killed"
    run(config, first, tmp_path / "whole")
    (killed / "net" / "tasks").mkdir(parents=True)
    (killed / "net" / ".lock").touch()
    (killed / "net" / ".weights-0001.safetensors.tmp").write_bytes(b"half")
    (killed / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())
    run(config, first, killed, resume=True)
    assert outcome(killed)[1] == outcome(tmp_path / "whole")[1]


def test_time_of_a_task_counts_what_it_took_before(stream: Stream, tmp_path: Path) -> None:
    stream, out = stream.first(2), tmp_path / "run"
    config = config_for(stream, epochs=3)

    def stop(now: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, stream, out, on_progress=stop)
    task = SeedRun(config, stream, out).open_task
    point = read_checkpoint(out, task, pytest.fail)
    assert point is not None
    assert point.seconds > 0
    point.seconds = 1000.0
    write_checkpoint(out, task, point)
    run(config, stream, out, resume=True)
    first, second = (line["seconds"] for line in read_lines(out))
    assert 1000 < first < 1100
    assert second < 100


# One process that loads everything once and forks the runs that are then killed: a new Python for
# each would take a hundred times as long. It computes nothing itself, so forking is safe.
KILLER = """
    import os, random, signal, sys, time
    from pathlib import Path
    import torch
    torch.set_num_threads(1)
    import rankup.methods.finetune, rankup.methods.rank, rankup.runs.run
    from rankup.data.streams import make_stream
    from helpers.runs import config_for

    method, root, wanted = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    stream = make_stream("p-digits", tasks=2)
    config = config_for(stream, method, epochs=10)

    def fork(out):
        child = os.fork()
        if child == 0:
            rankup.runs.run.run(config, stream, out, resume=(out / "config.json").exists())
            os._exit(0)
        return child

    started = time.perf_counter()
    assert os.waitpid(fork(root / "whole"), 0)[1] == 0
    longest = time.perf_counter() - started
    moments, kills, number = random.Random(0), 0, 0
    while kills < wanted:
        # Later and later: on a busy disk a task takes its time to be saved.
        status, before = 1, kills
        while status:
            child = fork(root / str(number))
            time.sleep(moments.uniform(0, longest / 2) * (1 + (kills - before) / 4))
            os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
            assert status == 0 or os.WIFSIGNALED(status), status
            kills += status != 0
        number += 1
    print(kills)
"""


@pytest.mark.parametrize("kills", [4, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ["rank", "finetune"])
def test_killed_and_resumed_run_equals_undisturbed(method: str, kills: int, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(KILLER), method, tmp_path, str(kills)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= kills
    resumed = [folder for folder in tmp_path.iterdir() if folder.name.isdigit()]
    assert resumed
    for folder in resumed:
        assert outcome(folder) == outcome(tmp_path / "whole")
        assert len(read_lines(folder)) == 2


def test_finished_run_learns_more_tasks(stream: Stream, whole: Path, tmp_path: Path) -> None:
    fewer = stream.first(2)
    run(config_for(fewer), fewer, tmp_path)
    run(config_for(stream), stream, tmp_path, resume=True)
    assert outcome(tmp_path) == outcome(whole)
    assert (tmp_path / "config.json").read_text() == (whole / "config.json").read_text()


@pytest.mark.parametrize("case", ["method", "split", "fewer", "others", "more"])
def test_run_takes_only_tasks_after_its_own(case: str, stream: Stream, tmp_path: Path) -> None:
    """Not if a method has divided itself among its tasks, or classes would be regrouped."""
    began, now = config_for(stream.first(2)), config_for(stream)
    if case == "method":
        began, now = replace(began, method="packnet"), replace(now, method="packnet")
    elif case == "split":
        began, now = replace(began, stream="s-digits"), replace(now, stream="s-digits")
    elif case == "fewer":
        began, now = now, began
    elif case == "others":
        now = replace(now, task_names=["another", *now.task_names[1:]])
    write_config(began, tmp_path)
    if case == "more":
        check_folder(now, tmp_path, resume=True)
        assert tasks_more(now, tmp_path) == 1
        return
    with pytest.raises(RunError, match=r"is a run with tasks \d, not \d"):
        check_folder(now, tmp_path, resume=True)
    assert tasks_more(now, tmp_path) == 0

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
from helpers.runs import (
    config_for,
    outcome,
)
from rankup.data.streams import Stream, make_stream
from rankup.rank import parse_rank
from rankup.runs.folder import (
    RunError,
    check_folder,
    read_checkpoint,
    tasks_more,
    write_checkpoint,
    write_config,
)
from rankup.runs.read import read_run
from rankup.runs.records import read_lines
from rankup.runs.run import Progress, run
from rankup.training.loop import TaskFailed


@pytest.fixture(scope="module")
def stream() -> Stream:
    return make_stream("p-digits", tasks=3)


def test_a_run_writes_what_the_report_reads(stream: Stream, tmp_path: Path) -> None:
    run(config_for(stream), stream, tmp_path / "run")
    lines = read_lines(tmp_path / "run")
    assert [set(line) for line in lines] == [
        {"task", "classes", "accuracy", "average_accuracy", "forgetting"}
        | {"parameters", "buffer", "seconds"}
    ] * 3
    assert lines[0]["classes"] == [str(digit) for digit in range(10)]
    assert [len(line["accuracy"]) for line in lines] == [1, 2, 3]
    assert all(line["forgetting"] == 0 for line in lines)
    assert all(0 <= value <= 1 for line in lines for value in line["accuracy"])
    assert lines[-1]["average_accuracy"] == pytest.approx(sum(lines[-1]["accuracy"]) / 3)
    assert rankup.verify(tmp_path / "run" / "net")
    net = rankup.load(tmp_path / "run" / "net")
    assert net.size().total == lines[-1]["parameters"]
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()
    assert list(read_run(tmp_path / "run").selectors) == ["hidden.0", "hidden.1"]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["recipe"]["epochs"] == 2
    assert config["threads"] == torch.get_num_threads()


def test_the_same_config_gives_the_same_run(stream: Stream, tmp_path: Path) -> None:
    for name in ("one", "two"):
        run(config_for(stream), stream, tmp_path / name)
    assert outcome(tmp_path / "one") == outcome(tmp_path / "two")


def test_a_run_folder_that_exists_is_refused(stream: Stream, tmp_path: Path) -> None:
    config = config_for(stream)
    run(config, stream, tmp_path / "run")
    before = outcome(tmp_path / "run")
    with pytest.raises(rankup.RankupError, match="already holds a run: add --resume"):
        run(config, stream, tmp_path / "run")
    other = config_for(stream, lr=0.5)
    with pytest.raises(rankup.RankupError, match="was started with lr .* continue with the same"):
        run(other, stream, tmp_path / "run", resume=True)
    run(config, stream, tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("text")
    with pytest.raises(rankup.RankupError, match="holds other files"):
        run(config, stream, tmp_path / "mine")
    with pytest.raises(rankup.RankupError, match="cannot write to"):
        run(config, stream, tmp_path / "mine" / "thesis.tex" / "run")


def test_a_run_that_was_killed_while_it_wrote_its_first_file_can_begin_again(
    stream: Stream, tmp_path: Path
) -> None:
    killed = """
        import os, pathlib, sys
        from rankup.storage.atomic import write_file
        os.replace = lambda *_: os.kill(os.getpid(), 9)
        write_file(pathlib.Path(sys.argv[1]), b"{")
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(killed), str(tmp_path / "config.json")]
    assert subprocess.run(command, env=env).returncode == -9
    assert [file.name for file in tmp_path.iterdir()] == [".config.json.tmp"]
    run(config_for(stream), stream, tmp_path)
    assert len(read_lines(tmp_path)) == 3
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_task_that_fails_stops_the_run_and_keeps_the_tasks_before(tmp_path: Path) -> None:
    stream = make_stream("p-digits", tasks=2)
    bad = replace(stream[1], train_x=torch.zeros_like(stream[1].train_x))
    broken = Stream("p-digits", (stream[0], bad))
    with pytest.raises(TaskFailed, match="task 'permutation 02' was not learned"):
        run(config_for(stream), broken, tmp_path / "run")
    assert len(read_lines(tmp_path / "run")) == 1
    assert rankup.load(tmp_path / "run" / "net").tasks == ["permutation 01"]


@pytest.mark.parametrize(
    ("rank", "seeded"), [("11", None), ("a,b", None), ("1,1", "lots"), ("1,1,1", None)]
)
def test_a_rank_that_cannot_be_read_is_refused(rank: str, seeded: str | None) -> None:
    with pytest.raises(rankup.RankupError, match="rank must be written like 11,1 or 0.1,0.02"):
        parse_rank(rank, seeded)


@pytest.mark.parametrize("method", ["rank", "finetune"])
def test_a_run_killed_in_its_first_save_goes_on(
    method: str, stream: Stream, tmp_path: Path
) -> None:
    config = config_for(stream, method)
    run(config, stream, tmp_path / "whole")
    killed = tmp_path / "killed"
    (killed / "net" / "tasks").mkdir(parents=True)
    (killed / "net" / ".lock").touch()
    (killed / "net" / ".weights.safetensors.tmp").write_bytes(b"half")
    (killed / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())
    run(config, stream, killed, resume=True)
    assert outcome(killed)[1] == outcome(tmp_path / "whole")[1]


def test_the_time_of_a_task_counts_what_it_took_before_it_was_stopped(
    stream: Stream, tmp_path: Path
) -> None:
    config, out = config_for(stream, epochs=3), tmp_path / "run"

    def stop(now: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, stream, out, on_progress=stop)
    point = read_checkpoint(out, 0, pytest.fail)
    assert point is not None
    assert point.seconds > 0
    point.seconds = 1000.0
    write_checkpoint(out, 0, point)
    run(config, stream, out, resume=True)
    first, *others = (line["seconds"] for line in read_lines(out))
    assert 1000 < first < 1100
    assert max(others) < 100


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

    method, out = sys.argv[1], Path(sys.argv[2])
    seed, longest = int(sys.argv[3]), float(sys.argv[4])
    stream = make_stream("p-digits", tasks=3)
    config = config_for(stream, method, epochs=40)
    moments, kills = random.Random(seed), 0
    while True:
        started = time.perf_counter()
        child = os.fork()
        if child == 0:
            rankup.runs.run.run(config, stream, out, resume=(out / "config.json").exists())
            os._exit(0)
        if seed >= 0:
            # Later and later: on a busy disk a task takes its time to be saved.
            time.sleep(moments.uniform(0, longest / 3) * (1 + kills / 8))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if status == 0:
            break
        assert os.WIFSIGNALED(status), status
        kills += 1
    print(kills, time.perf_counter() - started)
"""


@pytest.mark.parametrize("method", ["rank", "finetune"])
def test_a_killed_and_resumed_run_ends_as_an_undisturbed_one(method: str, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    kills, seed, longest = 0, -1, 0.0  # the first is not disturbed
    while kills < 20:
        arguments = [method, str(tmp_path / f"{seed}"), str(seed), str(longest)]
        command = [sys.executable, "-c", textwrap.dedent(KILLER), *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        kills += int(done.stdout.split()[0])
        longest = longest or float(done.stdout.split()[1])
        assert outcome(tmp_path / f"{seed}") == outcome(tmp_path / "-1")
        assert len(read_lines(tmp_path / f"{seed}")) == 3
        seed += 1


def test_a_finished_run_learns_more_tasks_as_if_they_had_been_asked_for_at_once(
    stream: Stream, tmp_path: Path
) -> None:
    fewer = replace(stream, tasks=stream.tasks[:2])
    run(config_for(fewer), fewer, tmp_path / "grown")
    run(config_for(stream), stream, tmp_path / "grown", resume=True)
    run(config_for(stream), stream, tmp_path / "at once")
    assert outcome(tmp_path / "grown") == outcome(tmp_path / "at once")
    configs = [(tmp_path / name / "config.json").read_text() for name in ("grown", "at once")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("case", ["method", "split", "fewer", "others", "more"])
def test_a_run_takes_on_only_tasks_that_come_after_its_own(
    case: str, stream: Stream, tmp_path: Path
) -> None:
    """Not if a method has divided itself among its tasks, or classes would be regrouped."""
    fewer = replace(stream, tasks=stream.tasks[:2])
    began, now = config_for(fewer), config_for(stream)
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

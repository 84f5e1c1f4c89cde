"""Ctrl-C, kill, and outputs that are full or closed: mostly in processes of their own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.calling import Call
from helpers.command import ENV
from helpers.reports import constant, write_run

RANKUP = [sys.executable, "-m", "rankup"]


def _ends_soon(group: int) -> bool:
    for _ in range(200):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize(
    ("seeds", "first", "stop"),
    [(1, "p-digits-rank-0", "kill"), (2, "p-digits-rank/seed-0", "Ctrl-C")],
)
def test_stopped_run_says_how_to_continue(
    seeds: int, first: str, stop: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "rankup", "run", "--tasks", "2", "--epochs", "200"]
    process = subprocess.Popen(
        [*command, "--seeds", str(seeds)],
        env=ENV,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    checkpoint = tmp_path / "runs" / first / "checkpoint.safetensors"
    while not checkpoint.exists():
        assert process.poll() is None
        time.sleep(0.05)
    if stop == "kill":
        process.terminate()
    else:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = process.communicate()
    assert process.returncode == 130
    assert errors.count("stopped") == 1
    assert "run the same command with --resume to continue" in errors
    assert "Traceback" not in errors
    assert checkpoint.exists()
    assert _ends_soon(process.pid)


@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize(
    ("where", "number"), [("checked_page", signal.SIGTERM), ("write_report", signal.SIGINT)]
)
def test_stop_without_bars_is_said(
    where: str, number: int, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        signal.raise_signal(number)

    monkeypatch.setattr(f"rankup.report.page.{where}", stop)
    done = call("report", write_run(tmp_path / "run", constant(2)))
    assert (done.code, done.err) == (130, "rankup: stopped\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_full_output_is_said() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*RANKUP, "methods"], env=ENV, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "rankup: the output cannot be written: No space left on device\n"


def test_closed_output_is_no_error() -> None:
    command = ["sh", "-c", '"$0" -m rankup streams >&-', sys.executable]
    done = subprocess.run(command, env=ENV, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_closed_pipe_says_nothing() -> None:
    command = [*RANKUP, "methods"]
    with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None
        run.stdout.close()
        assert run.communicate()[1] == b""

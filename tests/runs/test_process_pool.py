"""Work in processes: outcomes, errors and interrupts, none of which leaves a process behind."""

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rankup
from rankup.runs import process_pool


def double(number: int) -> int:
    warnings.warn(f"{number} is odd", stacklevel=1) if number % 2 else None
    process_pool.tell(f"at {number}")
    return 2 * number


def process_of(_: int) -> int:
    return os.getpid()


class Unpicklable(Exception):
    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} and {other}")


def fail(number: int) -> None:
    raise rankup.RankupError("0 is even") if number == 0 else Unpicklable("this", "that")


def leave_at_once(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def work(job: Callable[[int], Any], *items: int) -> list[tuple[int, Any]]:
    return list(process_pool.in_processes(job, items, 1, hear=pytest.fail, lost="it is lost"))


def test_outcomes_messages_and_warnings_arrive(capfd: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    done = process_pool.in_processes(double, range(4), 1, hear=told.append, lost="")
    assert sorted(done) == [(number, 2 * number) for number in range(4)]
    assert sorted(told) == [f"at {number}" for number in range(4)]
    assert sorted(capfd.readouterr().err.splitlines()) == [f"rankup: {n} is odd" for n in (1, 3)]
    assert work(double) == []


def test_an_error_is_raised_with_where_it_was() -> None:
    with pytest.raises(rankup.RankupError, match="^0 is even$") as caught:
        work(fail, 0)
    assert "in fail" in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match="^Unpicklable: this and that$"):
        process_pool.call(fail, 1)


def test_closing_early_leaves_no_process() -> None:
    done = process_pool.in_processes(process_of, range(9), 1, hear=pytest.fail, lost="")
    _, process = next(done)
    done.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_processes_wait_for_more_work_until_one_is_killed() -> None:
    """Which is reported; there are others then."""
    quiet: dict[str, Any] = {"hear": pytest.fail, "lost": "it is lost"}
    with process_pool.ProcessPool(1) as pool:
        ((_, first),) = pool.run(process_of, [0], **quiet)
        ((_, second),) = pool.run(process_of, [0], **quiet)
        with pytest.raises(rankup.RankupError, match="^it is lost$"):
            list(pool.run(leave_at_once, [0], **quiet))
        ((_, third),) = pool.run(process_of, [0], **quiet)
    assert first == second != third
    for process in (first, third):
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


_LONG_WORK = """
import sys

sys.path.insert(0, sys.argv[1])
from rankup.runs import process_pool
from helpers.beats import beat

if __name__ == "__main__":
    hear = lambda message: print(message, flush=True)
    list(process_pool.in_processes(beat, [600], 1, hear=hear, lost=""))
"""


@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_parent(sent: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(_LONG_WORK)
    command = [sys.executable, tmp_path / "work.py", Path(__file__).parents[1]]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.send_signal(sent)
        _, errors = parent.communicate(timeout=10)
    assert parent.returncode == -sent, errors
    assert sent == signal.SIGKILL or "KeyboardInterrupt" in errors.splitlines()[-1]
    for _ in range(100):
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("the worker goes on")

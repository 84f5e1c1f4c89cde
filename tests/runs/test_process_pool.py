"""Work in processes may be interrupted anywhere: it ends, and no process is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rankup
from rankup.runs import process_pool


def double(number: int) -> int:
    process_pool.tell(f"at {number}")
    return 2 * number


def process_of(_: int) -> int:
    time.sleep(0.1)
    return os.getpid()


def refuse(number: int) -> None:
    raise rankup.RankupError(f"{number} is odd")


def leave_at_once(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def cannot_be_sent(_: int) -> Callable[[], None]:
    return lambda: None


class Unpicklable(Exception):
    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} and {other}")


def fail_oddly(_: int) -> None:
    raise Unpicklable("this", "that")


def work(job: Callable[[int], Any], count: int, among: int) -> list[tuple[int, Any]]:
    told: list[str] = []
    done = process_pool.in_processes(job, range(count), among, hear=told.append, lost="it is lost")
    return sorted(done)


def test_every_item_is_worked_on_and_what_is_told_is_heard() -> None:
    told: list[str] = []
    done = process_pool.in_processes(double, range(5), 2, hear=told.append, lost="")
    assert sorted(done) == [(number, 2 * number) for number in range(5)]
    assert sorted(told) == [f"at {number}" for number in range(5)]
    assert work(double, 0, 2) == []


def test_a_process_takes_one_item_after_another() -> None:
    assert len({process for _, process in work(process_of, 6, 2)}) == 2


def test_an_error_in_a_process_is_raised_with_where_it_was() -> None:
    with pytest.raises(rankup.RankupError, match="0 is odd") as caught:
        work(refuse, 1, 1)
    assert "in refuse" in str(caught.value.__cause__)
    with pytest.raises(Exception, match="lambda"):
        work(cannot_be_sent, 1, 1)
    with pytest.raises(RuntimeError, match="^Unpicklable: this and that$") as caught_too:
        work(fail_oddly, 1, 1)
    assert "in fail_oddly" in str(caught_too.value.__cause__)


def test_a_process_that_is_killed_is_told_of() -> None:
    with pytest.raises(rankup.RankupError, match="^it is lost$"):
        work(leave_at_once, 1, 1)


def test_who_wants_no_more_leaves_no_process() -> None:
    done = process_pool.in_processes(process_of, range(9), 2, hear=pytest.fail, lost="")
    _, process = next(done)
    done.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


# Each time it is interrupted at a new point: where a line begins, and where a function returns, by
# then holding what it acquired. Workers import an empty torch, to begin at once.
_INTERRUPTED = """
import inspect, signal, sys
from multiprocessing import resource_tracker
from pathlib import Path

sys.path[:0] = [sys.argv[1], sys.argv[2]]
from rankup.runs import process_pool as workers
from jobs import double

OURS = workers.__file__
FILES = ("workers.py", "threading.py", "_base.py", "connection.py", "process.py", "selectors.py")
seen = set()


def children():
    pids = " ".join(path.read_text() for path in Path("/proc/self/task").glob("*/children"))
    return {int(pid) for pid in pids.split()} - {resource_tracker._resource_tracker._pid}


def interrupted(times):
    left = times

    def trace(frame, event, _):
        nonlocal left
        code = frame.f_code
        if not code.co_filename.endswith(FILES):
            return None
        place = code, event, frame.f_lineno, frame.f_back.f_code
        yields = code.co_flags & inspect.CO_GENERATOR  # where no real interrupt comes
        wanted = not yields if event == "return" else code.co_filename == OURS
        if left and wanted and place not in seen:
            seen.add(place)
            left -= 1
            signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        for _ in workers.in_processes(double, range(3), 2, hear=str, lost=""):
            pass
    except KeyboardInterrupt:
        pass
    sys.settrace(None)
    assert not children()
    return left < times


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    resource_tracker.ensure_running()
    tries = 0
    while interrupted(times=int(sys.argv[3])):
        tries += 1
    print(tries)
"""

_JOBS = """
from rankup.runs import process_pool as workers


def double(number):
    workers.tell(number)
    return 2 * number
"""


@pytest.mark.skipif(sys.platform != "linux", reason="children are looked for in /proc")
@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_may_come_anywhere_and_again(times: int, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("def set_num_threads(number): pass")
    (tmp_path / "jobs.py").write_text(_JOBS)
    (tmp_path / "work.py").write_text(_INTERRUPTED)
    source = Path(rankup.__file__).parents[1]
    command = [sys.executable, tmp_path / "work.py", source, tmp_path, str(times)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50

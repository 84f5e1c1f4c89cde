"""Progress of a run if there is no terminal for bars."""

import pytest

from rankup.cli import progress
from rankup.runs.seed_run import Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its only entry is the time."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_log_gets_a_line_now_and_then(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress.bars() as bars:
        line = bars.add_task("task 1/3", total=3, state="")
        for second in range(0, 100, 10):
            clock[0] = second
            bars.update(line, description=f"task {second}", state=f"loss {second}")
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines() == [f"rankup: task {n}, loss {n}" for n in (40, 80)]


def test_lines_in_a_log_name_the_method(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress.bars() as bars:
        methods = progress.MethodBars(bars, tasks=3, methods=2)
        methods.begin("ewc", {0: 0, 1: 0})
        clock[0] = 100.0
        methods.show(Progress(0, 1, 0, 2, 10, 0.5, 0.75))
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "rankup: ewc, seed 0, task 1/3, epoch 2/10, loss 0.500, 75.0% right"


def test_bars_leave_room_for_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal
    with progress.bars() as bars:
        assert not bars.disable
        assert bars.console.width == 78

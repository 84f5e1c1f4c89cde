"""Progress of a run if there is no terminal for bars."""

import pytest

from rankup.runs import progress


def test_without_a_terminal_a_line_is_said_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with progress.bars() as bars:
        line = bars.add_task("task 1/3", total=3, state="")
        for second in range(0, 100, 10):
            clock[0] = second
            bars.update(line, description=f"task {second}", state=f"loss {second}")
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines() == [f"rankup: task {n}, loss {n}" for n in (40, 80)]

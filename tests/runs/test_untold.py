"""Runs that are also tested without telling the task."""

from pathlib import Path

import pytest

import rankup
from rankup.report.tables import comparison_table, run_table
from rankup.runs.read import read_run


def test_rank_update_finds_tasks_by_its_router(tmp_path: Path) -> None:
    settings = {"epochs": 5, "width": 32, "untold": True}
    found = rankup.run(
        "rank", "s-digits", router="analytic,features=128", out=tmp_path / "a", **settings
    )
    assert found.untold is not None
    last = found.untold[-1]
    assert [len(row["accuracy"]) for row in found.untold] == [1, 2, 3, 4, 5]
    assert found.untold[0]["tasks"] == [1.0]  # with one task every guess is right
    assert sum(last["tasks"]) / 5 > 0.85
    assert sum(last["accuracy"]) / 5 > 0.8  # of ten classes, which the router also knows
    run = read_run(tmp_path / "a", selectors=False)
    assert run.untold is not None
    assert run.untold.rows[-1] == last["accuracy"]
    assert [str(column.header) for column in run_table(run).columns][-2:] == [
        "untold %",
        "task guessed %",
    ]
    assert "untold %" in [str(column.header) for column in comparison_table([run, run]).columns]


def test_permuted_streams_count_the_class_of_any_task() -> None:
    """All tasks are found, so that nothing is lost by adding up over them."""
    found = rankup.run("rank", "p-digits", tasks=3, epochs=3, width=32, router="means", untold=True)
    assert found.untold is not None
    assert found.untold[-1]["tasks"] == [1.0, 1.0, 1.0]
    assert found.untold[-1]["accuracy"] == pytest.approx(found.accuracy[-1])


@pytest.mark.parametrize("method", ["finetune", "icarl", "multitask", "rank"])
def test_rivals_answer_with_the_largest_logit_of_all(method: str) -> None:
    options = {"budget": 50} if method == "icarl" else {}
    options |= {"single_head": True} if method == "multitask" else {}
    found = rankup.run(method, "s-digits", tasks=2, epochs=3, width=32, untold=True, **options)
    assert found.untold is not None
    right, told = found.untold[-1]["accuracy"], found.accuracy[-1]
    assert all(0 <= a <= b for a, b in zip(right, told, strict=True))
    if method == "multitask":  # whose told answers are wrong wherever another task's class wins
        assert right == told


def test_runs_are_not_tested_so_unless_asked() -> None:
    assert rankup.run("finetune", "s-digits", tasks=2, epochs=1, width=16).untold is None

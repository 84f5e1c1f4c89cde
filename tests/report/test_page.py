"""Reports on run folders."""

import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.reports import (
    RECIPE,
    Page,
    constant,
    fading,
    named,
    printed,
    write_net,
    write_run,
)
from rankup.errors import RankupError
from rankup.metrics import AccuracyMatrix
from rankup.report.figures import LIGHT
from rankup.report.page import write_report
from rankup.report.plots import selectors_plot
from rankup.report.tables import comparison_table, run_table
from rankup.report.text import labels, mean_results, summary
from rankup.runs.read import Run, read_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rank run that forgets nothing, a finetune run that forgets, and a page with both."""
    root = tmp_path_factory.mktemp("runs")
    write_net(write_run(root / "rank", constant(10)) / "net", tasks=10)
    write_run(root / "finetune", fading(10), method="finetune", rank=None)
    write_report([read_run(root / "rank"), read_run(root / "finetune")], root / "page/report.html")
    return root


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[Run]:
    return [read_run(folder / "rank"), read_run(folder / "finetune")]


# Run folders


def test_run_is_read_back(runs: list[Run]) -> None:
    rank, finetune = runs
    assert (rank.method, rank.stream, len(rank.tasks)) == ("rank", "p-digits", 10)
    assert rank.tasks[0] == "permutation 01"
    assert rank.matrix.forgetting() == 0
    assert finetune.matrix.forgetting() > 0.4
    assert (rank.parameters, rank.buffer, rank.seconds) == (39_000, 0, 25)
    assert finetune.selectors == {}


def test_selectors_are_read_with_factor_sources(runs: list[Run]) -> None:
    selectors = runs[0].selectors
    assert list(selectors) == ["hidden.0", "hidden.1"]
    assert selectors["hidden.0"].shape == (10, 20)  # 11 factors of the first task, 1 of each other
    np.testing.assert_array_equal(
        np.isfinite(selectors["hidden.0"]).sum(axis=1), [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
    )
    assert runs[0].factors["hidden.1"] == [0, 11, 1, 1, 1, 1, 1, 1, 1, 1, 1]


# Words


def test_labels_name_the_fewest_settings() -> None:
    assert labels([named(), named(method="ewc", seed=1)]) == ["rank", "ewc"]
    assert labels([named(), named(seed=1)]) == ["rank (seed 0)", "rank (seed 1)"]
    longer = {**RECIPE, "epochs": 20}
    assert labels([named(), named(recipe=longer)]) == ["rank (epochs 10)", "rank (epochs 20)"]
    assert labels([named(), named(stream="r-digits")]) == ["rank on p-digits", "rank on r-digits"]
    assert labels([named(), named(), named(method="ewc")]) == ["rank #1", "rank #2", "ewc"]
    assert labels([named(seeded=None), named(seeded="256")]) == ["rank", "rank (seeded 256)"]
    alone, taught = named(options={"teacher": ""}), named(options={"teacher": "runs/large"})
    assert labels([alone, taught]) == ["rank", "rank (teacher runs/large)"]


def test_summary_is_a_sentence(runs: list[Run]) -> None:
    rank = "rank learned 10 tasks of p-digits: 95.47 % on average, forgetting 0.00"
    finetune = "finetune learned 10 tasks of p-digits: 53.26 % on average, forgetting 48.60"
    assert summary(runs[:1]) == rank
    assert summary(runs) == f"{rank}; {finetune}"
    assert summary([named(tasks=5)]).startswith("rank learned 1 of 5 tasks of p-digits")
    assert summary([*runs, named(), named()]).startswith("Of 4 runs the best on average is rank")
    assert summary([*runs, named(), named(stream="r-digits")]) == "4 runs on 2 streams"


def test_summary_finds_the_best_finished_run() -> None:
    ended = [named(seed=0, tasks=1), named(seed=1, tasks=1, width=9)]
    begun = [named(seed=seed, tasks=2) for seed in (2, 3, 4, 5)]
    for run in begun:
        run.matrix = AccuracyMatrix([[0.9]])
    said = "Of 6 runs, 2 of them finished, the best on average is rank (seed 0): 50.00 % on average"
    assert summary([*begun, *ended]).startswith(said)
    assert summary(begun) == "None of 4 runs has learned all its tasks yet"
    told = "rank (seed 2) learned 1 of 2 tasks of p-digits: 90.00 % on average, forgetting 0.00; "
    assert summary(begun[:2]).startswith(told)  # and not the mean of both


def test_mean_is_named_without_seeds() -> None:
    def means(*runs: Run) -> list[str]:
        return [mean["name"].removesuffix(", mean of 2 seeds") for mean in mean_results(runs)]

    def seeds(**config: Any) -> list[Run]:
        return [named(seed=seed, threads=seed, **config) for seed in (0, 1)]

    assert means(*seeds()) == ["rank"]
    assert means(*seeds(), named(method="ewc")) == ["rank"]
    assert means(*seeds(), named(stream="r-digits")) == ["rank on p-digits"]
    streams = means(*seeds(), *seeds(stream="r-digits"))
    assert streams == ["rank on p-digits", "rank on r-digits"]
    widths = means(*seeds(width=8), *seeds(width=9), named(method="{}"))
    assert widths == ["rank (width 8)", "rank (width 9)"]
    assert means(named(seed=0, width=8), named(seed=1, width=8), named(seed=2, width=9)) == [
        "rank (width 8)"  # though the seeds would be enough to tell these runs apart
    ]


# Tables


def cells(text: str, start: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.strip().startswith(start))
    return line.split()


def test_run_table(runs: list[Run]) -> None:
    text = printed(run_table(runs[1]))
    assert cells(text, "1 ") == ["1", "permutation", "01", "97.00", "28.60", "68.40"]
    assert cells(text, "average") == ["average", "97.00", "53.26", "48.60"]
    assert cells(printed(run_table(runs[0])), "average") == ["average", "95.47", "95.47", "0.00"]


def test_comparison_table(runs: list[Run]) -> None:
    text = printed(comparison_table(runs))
    assert cells(text, "rank") == ["rank", "95.47", "0.00", "39,000", "0", "25.0", "s"]
    assert cells(text, "finetune")[1:3] == ["53.26", "48.60"]


def test_run_table_says_if_unfinished(tmp_path: Path, runs: list[Run]) -> None:
    begun = read_run(write_run(tmp_path / "run", constant(2), tasks=6))
    assert "rank on p-digits, 2 of 6 tasks\n" in re.sub(" +\n", "\n", printed(run_table(begun)))
    assert " of " not in printed(run_table(runs[0]))


def test_comparison_table_says_which_are_unfinished(tmp_path: Path, runs: list[Run]) -> None:
    begun = read_run(write_run(tmp_path / "run", constant(2), tasks=6, method="ewc"))
    text = printed(comparison_table([*runs, begun]))
    assert cells(text, "ewc")[:6] == ["ewc,", "2", "of", "6", "tasks", "96.95"]
    assert text.count(" of ") == 1


def test_means_are_of_finished_seeds(tmp_path: Path) -> None:
    def seed(seed: int, rows: list[list[float]]) -> Run:
        return read_run(write_run(tmp_path / f"seed-{seed}", rows, seed=seed, tasks=2))

    ended = [seed(0, [[0.5], [0.5, 0.5]]), seed(1, [[0.7], [0.7, 0.7]])]
    begun = [seed(2, [[0.9]]), seed(3, [[0.9]])]
    assert "mean" not in printed(comparison_table(begun))
    assert "mean" not in printed(comparison_table([ended[0], *begun]))
    text = " ".join(printed(comparison_table([*begun, *ended])).split())
    assert "rank, mean of 2 60.00 ± 14.14 0.00 ± 0.00 15,000 0 5.0 s finished seeds" in text
    text = " ".join(printed(comparison_table(ended)).split())
    assert "rank, mean of 2 60.00 ± 14.14 0.00 ± 0.00 15,000 0 5.0 s seeds" in text


def test_means_name_their_stream(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / f"{stream}-{seed}", [[0.5]], stream=stream, seed=seed))
        for stream in ("p-digits", "r-digits")
        for seed in (0, 1)
    ]
    text = printed(comparison_table(runs))
    assert text.count("rank on p-digits") == text.count("rank on r-digits") == 3


def test_tables_keep_long_and_odd_names(tmp_path: Path) -> None:
    name = "[red]" + "very " * 20 + "long[/red]"
    run = read_run(write_run(tmp_path / "run", [[0.5]], method="m" * 60, task_names=[name]))
    assert "[red]very" in printed(run_table(run))
    assert "[/red]" in printed(run_table(run))
    assert printed(comparison_table([run, run])).count("m" * 20) >= 2


# The page


def test_page_is_self_contained(folder: Path) -> None:
    page = Page(folder / "page/report.html")
    assert page.html.startswith("<!doctype html>")
    assert not re.search(r"https?:|url\(|@import|<script", page.html)
    assert all(reference.startswith("data:") for reference in page.references)
    assert page.policy >= {"default-src 'none'", "img-src data:", "base-uri 'none'"}
    # Average, two matrices, the selectors of one run; each in light and dark.
    assert page.tags.count("img") == page.tags.count("source") == 4


def test_page_has_results_of_both_runs(folder: Path, runs: list[Run]) -> None:
    words = Page(folder / "page/report.html").words
    assert summary(runs) in words
    assert "rank 95.47 0.00 0.00 39,000 0 25.0 s" in " ".join(words.split())
    assert "finetune 53.26 48.60 −48.60 39,000 0 25.0 s" in " ".join(words.split())
    assert "1 permutation 01 97.00 0.00 28.60 68.40" in " ".join(words.split())
    assert "epochs 10 10" in " ".join(words.split())
    for heading in ("Results", "Accuracy matrix", "Selectors", "Tasks", "Settings"):
        assert f" {heading} " in words


def test_plots_lie_beside_the_page(folder: Path) -> None:
    names = ["average", "matrix-1", "matrix-2", "selectors-1"]
    expected = {f"{name}{theme}.png" for name in names for theme in ("", "-dark")}
    assert {path.name for path in (folder / "page").glob("*.png")} == expected
    for name in expected:
        content = (folder / "page" / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", content[16:24])
        assert 700 <= width <= 1200
        assert 500 <= height <= 1600
        assert len(content) < 200_000


def test_page_of_another_name_writes_no_plots(tmp_path: Path, runs: list[Run]) -> None:
    (tmp_path / "average.png").write_text("mine")
    page = write_report(runs, tmp_path / "mine.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["average.png", "mine.html"]
    assert (tmp_path / "average.png").read_text() == "mine"
    assert Page(page).tags.count("img") == 4


def test_page_escapes_names(tmp_path: Path) -> None:
    odd = '<b>x</b> & "y" $z$'
    run = write_run(tmp_path / "run", [[0.5]], method=odd, stream="<i>", task_names=[odd])
    page = Page(write_report([read_run(run)], tmp_path / "report.html"))
    assert not {"b", "i"} & set(page.tags)
    assert page.words.count(odd) >= 4
    assert "Selectors" not in page.words  # there are none to show


def test_page_of_runs_of_different_length(tmp_path: Path) -> None:
    long = read_run(write_run(tmp_path / "long", constant(3), task_names=["a", "b", "c"]))
    short = read_run(write_run(tmp_path / "short", constant(2), task_names=["a", "x"], seed=1))
    words = " ".join(Page(write_report([long, short], tmp_path / "report.html")).words.split())
    assert "1 a 97.00 0.00 97.00 0.00" in words
    assert "2 b / x 96.90 0.00 96.90 0.00" in words
    assert "3 c 96.80 0.00 – –" in words


def test_page_says_once_which_are_unfinished(tmp_path: Path) -> None:
    ended = read_run(write_run(tmp_path / "ended", constant(3), tasks=3))
    begun = read_run(write_run(tmp_path / "begun", constant(2), tasks=3, seed=1))
    few = Page(write_report([ended, begun], tmp_path / "few.html")).words
    assert few.split("Average accuracy as")[0].count("2 of 3 tasks") == 1  # in the summary
    many = [ended, begun, *(replace(ended, config={**ended.config, "seed": n}) for n in (2, 3))]
    words = " ".join(Page(write_report(many, tmp_path / "many.html")).words.split())
    assert words.count("2 of 3 tasks") == 1
    assert "rank (seed 1) , 2 of 3 tasks 96.95" in words
    assert "rank, mean of 3 finished seeds 96.90 ± 0.00" in words


def test_furthest_seed_is_drawn_for_all(tmp_path: Path) -> None:
    begun = read_run(write_run(tmp_path / "begun", constant(2), tasks=3))
    ended = read_run(write_run(tmp_path / "ended", constant(3), tasks=3, seed=1))
    write_report([begun, ended], tmp_path / "page/report.html")
    assert {path.name for path in (tmp_path / "page").glob("matrix-?.png")} == {"matrix-2.png"}


@pytest.mark.parametrize(
    "shape",
    [
        {"tasks": 1, "first": 1, "step": 0},
        {"tasks": 20, "first": 0, "step": 0, "seeded": 1024},
        {"tasks": 3, "first": 600, "step": 100, "seeded": 900},
        {"tasks": 2, "first": 2, "step": 1, "layers": tuple(f"conv{i}" for i in range(8))},
    ],
)
def test_selectors_of_any_shape_are_drawn(tmp_path: Path, shape: dict[str, Any]) -> None:
    write_net(write_run(tmp_path / "run", constant(shape["tasks"])) / "net", **shape)
    run = read_run(tmp_path / "run")
    figure = selectors_plot(run, LIGHT)
    figure.savefig(tmp_path / "plot.png", dpi=50)
    panels = [axes for axes in figure.axes if axes.get_title()]  # the others are colour bars
    assert len(panels) == len(run.selectors)
    for axes in panels:
        shown = axes.collections[0].get_array()
        assert shown.shape[0] == shape["tasks"]
        assert shown.shape[1] <= 410  # columns that can still be seen


def test_binned_selectors_keep_their_mean(tmp_path: Path) -> None:
    write_net(
        write_run(tmp_path / "run", constant(2)) / "net", tasks=2, first=0, step=0, seeded=800
    )
    run = read_run(tmp_path / "run")
    shown = selectors_plot(run, LIGHT).axes[0].collections[0].get_array()
    expected = np.abs(run.selectors["hidden.0"]).reshape(2, 200, 4).mean(axis=2)
    np.testing.assert_allclose(shown, expected)


def test_unwritable_page_is_said(tmp_path: Path, runs: list[Run]) -> None:
    with pytest.raises(RankupError, match="a report needs at least one run"):
        write_report([], tmp_path / "report.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(RankupError, match="report.html cannot be written: "):
        write_report(runs, tmp_path / "file" / "report.html")

"""Fixtures that several files of tests share."""

import gc
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from helpers.calling import Call, Done
from helpers.pictures import Pictures
from rankup.cli.main import main
from rankup.data import decode
from rankup.paper.results import Results
from rankup.runs import process_pool
from rankup.runs.process_pool import ProcessPool

# Tests draw the same values in every run: one that fails fails again.
settings.register_profile("same", derandomize=True)
settings.load_profile("same")


def pytest_collection_finish() -> None:
    """What is loaded by now stays: collections of garbage need not look through all of torch."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before fixtures of any scope
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKUP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RANKUP_DATA", raising=False)


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Where each decoded image came from."""
    seen: list[str] = []
    pixels = decode.pixels_of

    def counted(image: bytes | None, where: str, side: int | None) -> Pictures:
        seen.append(where)
        return pixels(image, where, side)

    monkeypatch.setattr(decode, "pixels_of", counted)
    return seen


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """`rankup` in this process, in a terminal of 80 columns; restores the number of threads."""

    def call(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["rankup", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            main()
        return Done(int(exit.value.code or 0), *capsys.readouterr())

    monkeypatch.setenv("COLUMNS", "80")
    threads = torch.get_num_threads()
    yield call
    torch.set_num_threads(threads)


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work for several processes is done in this one, which takes a fraction of the time."""

    def in_turn(
        _: ProcessPool, work: Callable[[Any], Any], items: Sequence[Any], *, hear: Any, lost: str
    ) -> Iterator[tuple[Any, Any]]:
        monkeypatch.setattr(process_pool, "tell", hear)
        yield from ((item, work(item)) for item in items)

    monkeypatch.setattr(ProcessPool, "run", in_turn)


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without plots, which take longer to draw than a small run to learn."""
    monkeypatch.setattr("rankup.report.page.write_plots", lambda *_: [])
    monkeypatch.setattr("rankup.report.page.embedded", lambda *_: {"average": ["", ""]})


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """Processes started in the background ignore it, and so do those that they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """Results of the paper's experiments: none yet."""
    return Results(tmp_path / "results")

"""Where and when a page is written, and what it never overwrites."""

import errno
import io
import json
import os
import re
import sys
from pathlib import Path

import pytest

from helpers.calling import Call
from helpers.reports import constant, write_run
from rankup.cli.report import report
from rankup.errors import RankupError
from rankup.report.page import write_report
from rankup.runs.read import read_run


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "page", "page.html.gz"])
def test_page_overwrites_no_other_file(tmp_path: Path, name: str) -> None:
    run = read_run(write_run(tmp_path / "run", constant(2)))
    (tmp_path / name).write_text("mine")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(RankupError, match=rf"name ends in \.html, got .*{re.escape(name)}$"):
        write_report([run], tmp_path / name)
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / name).read_text() == "mine"


def test_page_is_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [read_run(write_run(tmp_path / f"run {n}", constant(n))) for n in (2, 3)]
    page = write_report(runs[:1], tmp_path / "pages" / "PAGE.HTM")
    before = page.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RankupError, match="PAGE.HTM cannot be written: No space left on device$"):
        write_report(runs, page)
    assert list(page.parent.iterdir()) == [page]
    assert page.read_bytes() == before


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("of", ["a run", "a comparison"])
def test_page_and_table_fail_separately(
    of: str, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "c" / "rank" / "seed-0", constant(2))
    index = {"asked": {"stream": "p-digits"}, "seeds": [0], "methods": {"rank": True}, "failed": {}}
    (tmp_path / "c" / "compare.json").write_text(json.dumps(index))
    folder = run if of == "a run" else tmp_path / "c"
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", Full())
        with pytest.raises(OSError, match="No space left"):
            report([folder], tmp_path / "page.html")
    assert "96.95" in (tmp_path / "page.html").read_text()
    # If the page cannot be written, the table is still shown.
    done = call("report", folder, "--out", run / "config.json" / "page.html")
    assert done.code == 1
    assert "96.95" in done.out
    assert done.err.count("\n") == 1
    # A name that is not a page's is refused before anything is shown.
    done = call("report", folder, "--out", run / "config.json")
    assert (done.code, done.out) == (1, "")

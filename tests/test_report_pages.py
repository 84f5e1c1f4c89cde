"""Where a page is written, and over what it never is."""

import errno
import os
import re
from pathlib import Path

import pytest

from rankup.errors import RankupError
from rankup.report import read_run, write_report
from test_report import constant, write_run


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "page", "page.html.gz"])
def test_a_page_is_written_over_no_other_file(tmp_path: Path, name: str) -> None:
    run = read_run(write_run(tmp_path / "run", constant(2)))
    (tmp_path / name).write_text("mine")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(RankupError, match=rf"name ends in \.html, got .*{re.escape(name)}$"):
        write_report([run], tmp_path / name)
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / name).read_text() == "mine"


def test_a_page_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

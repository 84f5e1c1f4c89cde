"""Only regular files of bounded size are read, and nothing is waited for."""

import os
from pathlib import Path

import pytest

from rankup.utils.files import read_regular


def test_content_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert read_regular(tmp_path / "a") == read_regular(tmp_path / "b", most=7) == b"content"


def test_other_files_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(6 << 30)
    reasons = {
        "lost": "a link that leads nowhere",
        "pipe": "a pipe or a device",
        "device": "a pipe or a device",
        "large": "more than",
        ".": "a folder",
    }
    for name, reason in reasons.items():
        with pytest.raises(OSError, match=reason):
            read_regular(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "missing")

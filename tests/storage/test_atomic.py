"""Files are written whole, whatever lies where they are written first."""

import os
from pathlib import Path

import pytest

from rankup.storage.atomic import temporary_of, write_file


@pytest.mark.parametrize("kind", ["pipe", "link", "leftover"])
def test_what_lies_in_the_way_is_not_written_to(kind: str, tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "file", tmp_path / "elsewhere"
    elsewhere.write_bytes(b"of others")
    temporary = temporary_of(path)
    match kind:
        case "pipe":
            os.mkfifo(temporary)
        case "link":
            temporary.symlink_to(elsewhere)
        case _:
            temporary.write_bytes(b"longer than what is written")
    write_file(path, b"content")
    assert not path.is_symlink()
    assert path.read_bytes() == b"content"
    assert elsewhere.read_bytes() == b"of others"
    assert not temporary.exists()


def test_folder_in_the_way_is_an_error_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    temporary_of(path).mkdir()
    with pytest.raises(OSError, match="file"):
        write_file(path, b"content")
    assert path.read_bytes() == b"before"

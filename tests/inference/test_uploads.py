"""Zips from outside: images are taken by class, tricks are refused, and everything is bounded."""

import io
import stat
import zipfile
from pathlib import Path

import pytest

from helpers.serving import image
from rankup.errors import RankupError
from rankup.inference import uploads
from rankup.inference.uploads import unpack_images

Entries = list[tuple[str | zipfile.ZipInfo, bytes]]


def zipped(entries: Entries, kind: int = zipfile.ZIP_DEFLATED) -> io.BytesIO:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", kind) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    buffer.seek(0)
    return buffer


GOOD: Entries = [(f"{name}/{number}.png", image(number)) for name in "ab" for number in range(3)]


def written(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_images_are_written_by_class_under_names_of_our_own(tmp_path: Path) -> None:
    extra: Entries = [
        ("a/notes.txt", b"not an image"),
        ("__MACOSX/a/._1.png", b"not an image"),
        (".hidden/1.png", b"not an image"),
        ("b/", b""),
    ]
    assert unpack_images(zipped(GOOD + extra), tmp_path) == {"a": 3, "b": 3}
    assert written(tmp_path) == [
        f"{name}/0000{number}.png" for name in "ab" for number in (1, 2, 3)
    ]
    assert (tmp_path / "b" / "00003.png").read_bytes() == image(2)


def test_images_keep_the_order_of_their_names_whatever_the_zips_is(tmp_path: Path) -> None:
    unpack_images(zipped(GOOD[::-1]), tmp_path)
    for number in range(3):
        assert (tmp_path / "a" / f"0000{number + 1}.png").read_bytes() == image(number)


def test_folder_around_the_classes_is_dropped(tmp_path: Path) -> None:
    inside: Entries = [(f"photos/{name}", content) for name, content in GOOD]
    assert unpack_images(zipped(inside), tmp_path) == {"a": 3, "b": 3}
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def link() -> zipfile.ZipInfo:
    info = zipfile.ZipInfo("a/link.png")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("../a/1.png", "leads out of it"),
        ("a/../../b/1.png", "leads out of it"),
        ("/etc/a/1.png", "leads out of it"),
        ("a\\..\\1.png", "leads out of it"),
        ("C:/a/1.png", "leads out of it"),
        (link(), "has a link"),
        ("1.png", "lies in no folder"),
        ("a\x07b/1.png", "is no name for a class"),
        (f"{'n' * 101}/1.png", "is no name for a class"),
    ],
)
def test_tricks_with_paths_are_refused(
    tmp_path: Path, entry: str | zipfile.ZipInfo, why: str
) -> None:
    with pytest.raises(RankupError, match=why):
        unpack_images(zipped([*GOOD, (entry, image())]), tmp_path / "in")
    assert written(tmp_path) == []


def test_bomb_is_refused_while_it_unpacks(tmp_path: Path) -> None:
    bomb = zipped([*GOOD, ("a/bomb.png", bytes(40 << 20))])
    assert len(bomb.getvalue()) < 1 << 20
    with pytest.raises(RankupError, match="unpacks to too much"):
        unpack_images(bomb, tmp_path)
    assert (tmp_path / "a" / "00004.png").stat().st_size <= 10 << 20


def test_size_that_an_entry_claims_is_not_trusted(tmp_path: Path) -> None:
    archive = zipped([*GOOD, ("a/lies.png", bytes(40 << 20))])
    content = archive.getvalue().replace(
        (40 << 20).to_bytes(4, "little"), (9).to_bytes(4, "little")
    )
    with pytest.raises(RankupError):
        unpack_images(io.BytesIO(content), tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.png")) < 10 << 20


def test_all_images_together_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "_MOST_UNPACKED", 4 * len(image()))
    with pytest.raises(RankupError, match="unpacks to too much"):
        unpack_images(zipped(GOOD), tmp_path)


def test_counts_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "_MOST_FILES", 5)
    with pytest.raises(RankupError, match="has 6 images, expected at most 5"):
        unpack_images(zipped(GOOD), tmp_path)
    with pytest.raises(RankupError, match="has 12 entries"):
        unpack_images(zipped(GOOD + [(f"{n}.txt", b"") for n in range(6)]), tmp_path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "cannot be read"),
        (b"not a zip", "cannot be read"),
        (zipped(GOOD).getvalue()[:-30], "cannot be read"),
        (zipped([]).getvalue(), "no images in folders"),
        (zipped(GOOD[:3]).getvalue(), "1 folders of images, expected 2 to 1000"),
    ],
)
def test_what_is_no_zip_of_classes_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    with pytest.raises(RankupError, match=why):
        unpack_images(io.BytesIO(content), tmp_path)


def test_damaged_content_is_refused(tmp_path: Path) -> None:
    stored = zipped(GOOD, zipfile.ZIP_STORED).getvalue()
    damaged = bytearray(stored)
    damaged[60:70] = b"\0" * 10
    with pytest.raises(RankupError):
        unpack_images(io.BytesIO(bytes(damaged)), tmp_path)

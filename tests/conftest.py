"""Fixtures that several files of tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pictures import Pictures
from rankup.data import decode


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKUP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RANKUP_DATA", raising=False)


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Where each image came from that was decoded."""
    seen: list[str] = []
    pixels = decode._pixels

    def counted(image: bytes | None, where: str, side: int | None) -> Pictures:
        seen.append(where)
        return pixels(image, where, side)

    monkeypatch.setattr(decode, "_pixels", counted)
    return seen

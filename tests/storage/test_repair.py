"""Saving over what was saved before: files of its own are repaired, others are left alone."""

from collections.abc import Sequence
from pathlib import Path

import pytest

import rankup
from helpers.zoo import inputs, taught, teach
from rankup import IncrementalNet as Net
from rankup.layers import Tensors
from rankup.storage import saving


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    rankup.save(taught("mlp"), tmp_path / "net")
    return tmp_path / "net"


def first_task(folder: Path) -> Path:
    return folder / "tasks" / "task_0-d2b7b301.safetensors"


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing"])
def test_save_repairs_damaged_files(damage: str, saved: Path) -> None:
    net = rankup.load(saved)
    teach(net, "one more", inputs("mlp"))
    path = first_task(saved)
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if damage == "cut" else content[:-1] + b"x")
    rankup.save(net, saved)
    assert path.read_bytes() == content
    assert rankup.verify(saved)


def test_save_removes_only_its_own_temporary_files(saved: Path) -> None:
    net = rankup.load(saved)
    teach(net, "one more", inputs("mlp"))
    others = [saved / ".notes.tmp", saved / "tasks" / ".mine.tmp"]
    left_over = [saved / ".manifest.json.tmp", saved / "tasks" / ".0004-x.safetensors.tmp"]
    for path in (*others, *left_over):
        path.write_bytes(b"")
    rankup.save(net, saved)
    assert [path.exists() for path in (*others, *left_over)] == [True, True, False, False]


def test_saving_one_more_task_writes_out_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rankup.save(taught("mlp", base="keep"), tmp_path)
    net = rankup.load(tmp_path)
    teach(net, "one more", inputs("mlp"))
    made: list[str | None] = []
    to_bytes = saving._to_bytes

    def counted(
        net: Net, parts: Sequence[Tensors], about: dict[str, object] | None, row: Tensors
    ) -> bytes:
        made.append(about and str(about["name"]))
        return to_bytes(net, parts, about, row)

    monkeypatch.setattr(saving, "_to_bytes", counted)
    rankup.save(net, tmp_path)
    assert made == ["one more"]
    assert rankup.verify(tmp_path)

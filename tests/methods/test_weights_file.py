"""How a method's weights are written, sealed and read."""

import json
import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import rankup
from rankup.methods.shared import weights_file
from rankup.methods.shared.weights_file import (
    About,
    has_weights,
    read_weights,
    verify_weights,
    write_weights,
)
from rankup.storage.seal import seal
from rankup.testing import answers, learn, make_method, split_digits

OF = "Mine with seed 0"


def write(folder: Path, value: float, tasks: int = 1) -> None:
    write_weights(folder, {"shared/a": torch.full((3,), value)}, About(OF, tasks))


def value_in(folder: Path) -> float:
    return float(read_weights(folder, OF).tensors["shared/a"][0])


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def resealed(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    data = json.loads(path.read_bytes()) | changes
    data.pop("sha256")
    path.write_text(json.dumps(data | {"sha256": seal(data)}))


def unsealed(folder: Path) -> None:
    """Make it what version 0.1 wrote."""
    (weights,) = folder.glob("weights-*")
    weights.rename(folder / "weights.safetensors")
    (folder / "manifest.json").unlink()


def test_each_save_has_a_name_of_its_own(tmp_path: Path) -> None:
    assert not has_weights(tmp_path)
    for number in range(1, 4):
        write(tmp_path, number)
        assert names(tmp_path) == {"manifest.json", f"weights-{number:04}.safetensors"}
        assert value_in(tmp_path) == number
    write(tmp_path, 3)  # nothing is new
    assert names(tmp_path) == {"manifest.json", "weights-0003.safetensors"}
    (tmp_path / "weights-0003.safetensors").write_bytes(b"damaged")
    write(tmp_path, 3)
    assert value_in(tmp_path) == 3


@pytest.mark.parametrize("begun_by", ["this version", "version 0.1"])
@pytest.mark.parametrize("step", range(6))
def test_killed_save_leaves_old_or_new_state(
    begun_by: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    if begun_by == "version 0.1":
        unsealed(tmp_path)
    done: list[str] = []

    def killed(name: str) -> None:
        done.append(name)
        if len(done) > step:
            raise KeyboardInterrupt

    for name in ("replace", "unlink"):
        own = getattr(os, name)

        def step_of(*args: Any, own: Any = own, name: str = name, **options: Any) -> None:
            killed(name)
            own(*args, **options)

        monkeypatch.setattr(os, name, step_of)
    with suppress(KeyboardInterrupt):
        write(tmp_path, 2)
    monkeypatch.undo()
    # The weights are moved into place first, then the manifest, which makes them count.
    assert value_in(tmp_path) == (2 if done[:step].count("replace") == 2 else 1)
    assert not verify_weights(tmp_path)
    write(tmp_path, 2)
    assert len(names(tmp_path)) == 2
    write(tmp_path, 3)
    assert len(names(tmp_path)) == 2
    assert value_in(tmp_path) == 3


def test_first_save_that_was_killed_is_none(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "manifest.json").unlink()
    assert not has_weights(tmp_path)
    (tmp_path / ".weights-0001.safetensors.tmp").touch()
    write(tmp_path, 2)
    assert names(tmp_path) == {"manifest.json", "weights-0001.safetensors"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "rankup network"}, "is not the manifest of a method's weights"),
        ({"version": 2}, "has format version 2, but this rankup reads version 1"),
        ({"of": "a\nb"}, "of is 'a.*', expected a name of at most"),
        ({"tasks": -1}, "tasks is -1, expected a whole number from 0 to"),
        ({"tasks": True}, "tasks is True, expected a whole number"),
        ({"more": 1}, "it has an unknown entry 'more'"),
        ({"weights": None}, "weights is None, expected an object"),
        (
            {"weights": {"file": "../weights-0001.safetensors", "size": 1, "sha256": "0" * 64}},
            "expected a name like weights-0001.safetensors",
        ),
        (
            {"weights": {"file": "weights-0001.safetensors", "size": 1e99, "sha256": "0" * 64}},
            "size is 1e.99, expected a whole number",
        ),
        (
            {"weights": {"file": "weights-0001.safetensors", "size": 9, "sha256": "0" * 64}},
            "is not the file that was saved: it has .* bytes, more than 9",
        ),
    ],
)
def test_manifest_is_checked(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, 1)
    resealed(tmp_path, **changes)
    with pytest.raises(rankup.StoreError, match=message) as caught:
        read_weights(tmp_path, OF)
    assert str(caught.value).isprintable()
    assert verify_weights(tmp_path) == [str(caught.value)]


@pytest.mark.parametrize("name", ["manifest.json", "weights-0001.safetensors"])
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    (problem,) = verify_weights(tmp_path)
    assert f"{name} cannot be read: it is a pipe or a device" in problem


def test_verify_names_what_is_not_finite(tmp_path: Path) -> None:
    write(tmp_path, torch.nan)
    (problem,) = verify_weights(tmp_path)
    assert problem.endswith("'shared/a' holds numbers that are not finite")
    write(tmp_path, 1)
    assert verify_weights(tmp_path) == []
    assert verify_weights(tmp_path / "none") == [f"{tmp_path}/none/manifest.json is missing"]


@pytest.mark.parametrize("name", ["finetune", "parallel"])
def test_weights_without_hashes_are_read_with_one_warning(name: str, tmp_path: Path) -> None:
    stream = split_digits(3)
    method = make_method(name, stream, epochs=2)
    learn(method, stream, 2)
    method.save(tmp_path)
    unsealed(sorted(tmp_path.rglob("manifest.json"))[-1].parent)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loaded = type(method).load(tmp_path, method.setting)
    assert [f"{tmp_path} was saved by version 0.1" in str(one.message) for one in said] == [True]
    for task in range(2):
        assert torch.equal(answers(loaded, stream, task), answers(method, stream, task))
    learn(loaded, stream, 3)
    loaded.save(tmp_path)
    assert list(tmp_path.rglob("manifest.json"))


def test_damaged_seal_is_not_taken_for_none(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "weights.safetensors").write_bytes(b"older")
    for content in (b"", b"{}", b"null", b"[" * 20000):
        (tmp_path / "manifest.json").write_bytes(content)
        with pytest.raises(rankup.StoreError, match="manifest.json is"):
            read_weights(tmp_path, OF)


def test_other_writer_of_old_weights_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 1)
    unsealed(tmp_path)
    with pytest.raises(rankup.StoreError, match="belongs to Mine with seed 0, not to Mine with se"):
        read_weights(tmp_path, "Mine with seed 1")


def test_save_over_a_damaged_manifest_is_whole(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "manifest.json").write_bytes(b"damaged")
    write(tmp_path, 2)
    assert value_in(tmp_path) == 2
    assert names(tmp_path) == {"manifest.json", "weights-0002.safetensors"}
    assert weights_file.is_unsealed(tmp_path) is False


def test_save_in_the_middle_of_a_read_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    read, left = weights_file._described, [2.0]

    def meanwhile(*args: Any) -> tuple[Path, bytes]:
        if left:
            write(tmp_path, left.pop())
        return read(*args)

    monkeypatch.setattr(weights_file, "_described", meanwhile)
    assert value_in(tmp_path) == 2


def test_a_network_is_not_overwritten(tmp_path: Path) -> None:
    rankup.save(rankup.grow(rankup.models.mlp(4, hidden=[3]), rankup.Rank(2, 1)), tmp_path / "net")
    with pytest.raises(rankup.StoreError, match="net holds a grown network: save this method to a"):
        write(tmp_path / "net", 1)
    assert rankup.verify(tmp_path / "net")
    write(tmp_path / "other", 1)
    for refused in (rankup.load, lambda path: rankup.save(rankup.load(tmp_path / "net"), path)):
        with pytest.raises(rankup.StoreError, match="a rankup network, but of a method.s weights"):
            refused(tmp_path / "other")

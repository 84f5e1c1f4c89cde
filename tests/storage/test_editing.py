"""Tasks removed and joined on disk: the same files as by way of a loaded network, which is never
loaded."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import safetensors.torch
import torch

import rankup
from helpers.zoo import assert_same_bits, hashes, inputs, logits, module, taught, teach
from rankup.data.inputs import TensorInput
from rankup.storage.editing import joining, removal


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, no tensor can be loaded."""

    def refuse(*_: object) -> NoReturn:
        raise AssertionError("a tensor was loaded")

    return lambda: monkeypatch.setattr(safetensors.torch, "load", refuse)


def of_own_tasks(names: str, base: str = "keep") -> rankup.IncrementalNet:
    torch.manual_seed(0)
    net = rankup.grow(module("mlp"), rankup.Rank(2, 1), base=base)
    net.inputs = TensorInput((9,))
    for name in names:
        teach(net, name, inputs("mlp"), uses="own")
        net.annotate(name, title=name.upper())
    return net.eval()


def test_removal_is_that_of_a_loaded_network(tmp_path: Path, unread: Callable[[], None]) -> None:
    net = of_own_tasks("abc")
    teach(net, "d", inputs("mlp"), uses=["b"])
    rankup.save(net, tmp_path / "net")
    shutil.copytree(tmp_path / "net", tmp_path / "other")
    loaded = rankup.load(tmp_path / "other")
    for name in "db":
        loaded.remove_task(name)
    rankup.save(loaded, tmp_path / "other")
    unread()
    removal(tmp_path / "net", ["b", "d"]).carry_out()
    assert hashes(tmp_path / "net") == hashes(tmp_path / "other")


def test_needed_task_is_not_removed(tmp_path: Path) -> None:
    net = of_own_tasks("ab")
    teach(net, "c", inputs("mlp"), uses=["a"])
    rankup.save(net, tmp_path / "net")
    before = hashes(tmp_path / "net")
    with pytest.raises(rankup.TaskStateError, match="'a' cannot be removed: 'c' selects from its"):
        removal(tmp_path / "net", ["a"])
    with pytest.raises(rankup.RankupError, match="there is no task 'x'"):
        removal(tmp_path / "net", ["x"])
    assert hashes(tmp_path / "net") == before


@pytest.mark.parametrize("on_disk", [False, True])
def test_tasks_without_factors_go_while_others_name_them(tmp_path: Path, on_disk: bool) -> None:
    net, x = taught("mlp", rank=rankup.Rank(first=0, step=0, seeded="4x")), inputs("mlp")
    rankup.save(net, tmp_path / "net")
    before = logits(net, x)[1:]
    if on_disk:
        removal(tmp_path / "net", ["task 0"]).carry_out()
    else:
        net.remove_task("task 0")
        rankup.save(net, tmp_path / "net")
    assert rankup.verify(tmp_path / "net")
    assert_same_bits(before, logits(rankup.load(tmp_path / "net"), x))


def test_joined_is_that_of_loaded_networks(tmp_path: Path, unread: Callable[[], None]) -> None:
    mine, theirs = of_own_tasks("ab"), of_own_tasks("bcd")
    for name, net in (("mine", mine), ("other", mine), ("theirs", theirs)):
        rankup.save(net, tmp_path / name)
    loaded = rankup.load(tmp_path / "other")
    loaded.join(rankup.load(tmp_path / "theirs"))
    rankup.save(loaded, tmp_path / "other")
    unread()
    edit = joining(tmp_path / "mine", tmp_path / "theirs")
    assert [task.name for task, _ in edit.new.tasks] == [*"abcd"]
    edit.carry_out()
    mine_now, other_now = hashes(tmp_path / "mine"), hashes(tmp_path / "other")
    assert mine_now.pop("about.json") != ""
    assert other_now.pop("about.json") != ""
    assert mine_now == other_now


def test_joined_network_answers_as_both_did(tmp_path: Path) -> None:
    mine, theirs, x = of_own_tasks("ab"), of_own_tasks("cd"), inputs("mlp")
    rankup.save(mine, tmp_path / "mine")
    rankup.save(theirs, tmp_path / "theirs")
    joining(tmp_path / "mine", tmp_path / "theirs").carry_out()
    joining(tmp_path / "new", tmp_path / "theirs").carry_out()
    assert rankup.verify(tmp_path / "mine")
    joined = rankup.load(tmp_path / "mine")
    assert_same_bits([*logits(mine, x), *logits(theirs, x)], logits(joined, x))
    assert_same_bits(logits(theirs, x), logits(rankup.load(tmp_path / "new"), x))
    assert joined.describe("d").title == "D"


def test_damaged_task_does_not_come_in(tmp_path: Path) -> None:
    rankup.save(of_own_tasks("a"), tmp_path / "mine")
    rankup.save(of_own_tasks("b"), tmp_path / "theirs")
    before = hashes(tmp_path / "mine")
    (file,) = (tmp_path / "theirs" / "tasks").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(rankup.StoreError, match="is truncated"):
        joining(tmp_path / "mine", tmp_path / "theirs").carry_out()
    assert hashes(tmp_path / "mine") == before


@pytest.mark.parametrize(
    ("theirs", "sentence"),
    [
        (lambda: of_own_tasks("b", base="new"), "grown alike can be joined: options differ"),
        (lambda: taught("mlp", tasks=(3,)), "grown alike can be joined: options differ"),
    ],
)
def test_networks_grown_otherwise_are_not_joined(
    theirs: Callable[[], rankup.IncrementalNet], sentence: str, tmp_path: Path
) -> None:
    rankup.save(of_own_tasks("a"), tmp_path / "mine")
    rankup.save(theirs(), tmp_path / "theirs")
    with pytest.raises(rankup.RankupError, match=sentence):
        joining(tmp_path / "mine", tmp_path / "theirs")


def test_other_task_of_a_name_is_not_joined(tmp_path: Path) -> None:
    rankup.save(of_own_tasks("a"), tmp_path / "mine")
    other = of_own_tasks("")
    teach(other, "a", inputs("mlp"), classes=4, uses="own")
    rankup.save(other, tmp_path / "theirs")
    with pytest.raises(rankup.RankupError, match="know different tasks of the name 'a'"):
        joining(tmp_path / "mine", tmp_path / "theirs")

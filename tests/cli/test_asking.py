"""Asking networks on the command line: on the Hugging Face Hub, and about what cannot be read."""

import json
import shutil
from pathlib import Path

import pytest

from helpers.calling import Call
from helpers.hub import FolderHub
from helpers.own_images import own_images

SHOP = "user/shop"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FolderHub:
    return FolderHub(tmp_path / "hub", monkeypatch)


@pytest.fixture
def root(tmp_path: Path, call: Call) -> Path:
    """A network of two tasks that stand on their own, and photos that they were learned from."""
    net = tmp_path / "net"
    assert call("new", net, "--net", "mlp", "--size", "6", "--width", "24").code == 0
    for name, classes in (("first", "ab"), ("second", "xyz")):
        images = own_images(tmp_path / name, *classes)
        done = call("learn", net, images, "--uses", "own", "--epochs", "40", "--title", f"{name}!")
        assert done.code == 0, done.err
    return tmp_path


def test_networks_on_the_hub_are_asked_as_those_in_folders(
    hub: FolderHub, root: Path, call: Call
) -> None:
    assert call("push", root / "net", SHOP).code == 0
    (commit,) = hub.commits[SHOP][1:]
    images, there = root / "first", f"hf://{SHOP}"
    for place in (there, f"{there}@{commit}"):
        for words in (
            ("tasks", "--json"),
            ("info",),
            ("predict", images, "--task", "first", "--csv"),
            ("test", images, "--task", "first", "--json"),
        ):
            command, *rest = words
            done = call(command, place, *rest)
            assert (done.code, done.err) == (0, "")
            assert done.out == call(command, root / "net", *rest).out
    assert "first!" in call("tasks", there).out


def test_only_what_the_asked_task_needs_is_fetched(hub: FolderHub, root: Path, call: Call) -> None:
    call("push", root / "net", SHOP)
    hub.fetched.clear()
    assert call("tasks", f"hf://{SHOP}").code == 0
    assert {*hub.fetched} == {"manifest.json", "about.json"}
    image = root / "second" / "x" / "0.png"
    assert call("predict", f"hf://{SHOP}", image, "--task", "second").code == 0
    fetched = [name for name in hub.fetched if name.startswith("tasks/")]
    assert [name.startswith("tasks/second") for name in fetched] == [True]


def test_wrong_address_is_refused_in_a_sentence(hub: FolderHub, root: Path, call: Call) -> None:
    call("push", root / "net", SHOP)
    for address, said in (
        ("hf://user/none", "there is no such repository"),
        (f"hf://{SHOP}@none", "no such revision"),
        ("hf://shop", "is written user/name"),
    ):
        done = call("predict", address, root / "first", "--task", "first")
        assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
        assert said in done.err
    done = call("predict", f"hf://{SHOP}", root / "first")
    assert f"hf://{SHOP} knows 2 tasks; name one with --task" in done.err


@pytest.mark.parametrize("words", ["learn {} photos", "export {}", "serve {}", "join {} net"])
def test_what_needs_a_folder_says_how_to_fetch_one(words: str, call: Call) -> None:
    done = call(*words.format("hf://user/shop").split())
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert "fetch it with `rankup pull user/shop`" in done.err


def test_images_that_cannot_be_read_are_named_and_the_others_answered(
    root: Path, call: Call
) -> None:
    images = root / "first"
    asked = ("predict", root / "net", images, root / "none.png", "--task", "first", "--json")
    (images / "a" / "3.png").write_bytes(b"broken")
    done = call(*asked)
    assert done.code == 1
    assert len(json.loads(done.out)) == 23
    lines = done.err.splitlines()
    assert len(lines) == 2
    assert "a/3.png: the image is broken" in lines[0]
    assert "none.png cannot be read" in lines[1]
    shutil.rmtree(images)
    done = call("predict", root / "net", root / "none.png", "--task", "first")
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)

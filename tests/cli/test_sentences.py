"""What commands say: what to do next, and lines that fit a terminal."""

import io
from pathlib import Path

import pytest

import rankup
from helpers.calling import Call
from helpers.own_images import own_images
from rankup.cli.sentences import say


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_sentences_break_between_words_in_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    path = "nets/" + 30 * "x"
    terminal, file = Terminal(), io.StringIO()
    for out in (terminal, file):
        say(f"learned pre-war shoes and saved {path} for later", out)
    assert terminal.getvalue() == f"learned pre-war\nshoes and saved\n{path}\nfor later\n"
    assert file.getvalue().count("\n") == 1


def test_each_step_names_the_next(tmp_path: Path, call: Call) -> None:
    net = tmp_path / "net"
    made = call("new", net, "--net", "mlp", "--size", "6", "--width", "24")
    assert made.out.splitlines()[-1] == f"Teach it a task: rankup learn {net} FOLDER"
    for name, says in (("first", True), ("second", False)):
        images = own_images(tmp_path / name, "a", "b")
        learned = call("learn", net, images, "--epochs", "40").out
        assert (f"Ask it: rankup predict {net} IMAGE" in learned) == says


def test_several_folders_are_verified(tmp_path: Path, call: Call) -> None:
    for name in "ab":
        call("new", tmp_path / name, "--net", "mlp", "--size", "4")
    assert call("verify", tmp_path / "a", tmp_path / "b").out.count("is whole") == 2
    (tmp_path / "a" / "manifest.json").write_text("{}")
    assert call("verify", tmp_path / "b", tmp_path / "a").code == 1


def test_info_tells_inputs_and_rule_in_words(tmp_path: Path, call: Call) -> None:
    call("new", tmp_path / "net", "--net", "mlp", "--size", "6", "--width", "24", "--rank", "4,2")
    lines = call("info", tmp_path / "net").out.splitlines()
    assert lines[:2] == [
        "mlp, takes RGB images of 6×6 pixels (lanczos)",
        "The first task adds rank 4, later ones 2",
    ]
    rules = {"hidden.0": rankup.Rank(3, 1), "*": rankup.Rank(2, 1)}
    net = rankup.grow(rankup.models.mlp(9, hidden=[9, 9]), rules)
    rankup.save(net, tmp_path / "other")
    shown = call("info", tmp_path / "other").out
    assert shown.startswith("mlp, its files do not say what it takes\n")
    assert "hidden.0: The first task adds rank 3, later ones 1" in shown

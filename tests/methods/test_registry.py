"""Methods that other packages and files register."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.calling import Call
from helpers.outside import only_built_in
from rankup.errors import RankupError
from rankup.methods import (
    METHODS,
    Options,
    all_methods,
    method_class,
    method_info,
    method_options,
    option,
    register,
)
from rankup.methods.finetune import FineTune
from rankup.methods.search import trials

PLUGIN = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Literal
from rankup.methods import Options, option, register
from rankup.methods.finetune import FineTune

@dataclass(frozen=True)
class MineOptions(Options):
    grip: float = option(2.0, "How firmly it holds.", least=0)
    mode: Literal["soft", "hard"] = option("soft", "One of two.")
    plain: int = 3

@register("mine", help="of mine", options=MineOptions, recipe={"lr": 0.02})
class Mine(FineTune): ...
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with only_built_in(monkeypatch):
        yield
    sys.modules.pop("my_methods", None)


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "my_methods.py"
    path.write_text(PLUGIN)
    return path


@pytest.mark.parametrize("place", ["my_methods.py", "my_methods", " my_methods , my_methods.py"])
def test_variable_names_modules_and_files(
    place: str, plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKUP_METHODS", place)
    assert method_class("mine").__name__ == "Mine"
    assert list(all_methods())[-1] == "mine"
    assert method_info("mine").recipe == {"lr": 0.02}
    with pytest.raises(RankupError, match="grip must be at least 0, got -1"):
        method_options("mine", {"grip": -1.0})
    with pytest.raises(RankupError, match="mode must be one of soft, hard, got 'wet'"):
        method_options("mine", {"mode": "wet"})


def test_installed_packages_are_found(plugin: Path) -> None:
    installed = plugin.parent / "my_methods-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my-methods\nVersion: 1.0\n")
    entries = "[rankup.methods]\nmine = my_methods:Mine\n"
    (installed / "entry_points.txt").write_text(entries)
    assert method_class("mine").__name__ == "Mine"
    (installed / "entry_points.txt").write_text(entries + "yours = my_methods\n")
    message = r"entry point 'yours' \(my_methods\) cannot be imported: it registers no method 'you"
    with pytest.raises(RankupError, match=message):
        method_info("yours")


def test_options_are_flags(plugin: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKUP_METHODS", str(plugin))
    shown = call("run", "--help").out
    assert "mine (2)" in shown
    assert "<soft|hard>" in shown
    assert "--plain" in shown
    wrong = call("run", "--method", "mine", "--grip", -3)
    assert wrong.err == "rankup: grip must be at least 0, got -3.0\n"
    monkeypatch.setenv("RANKUP_METHODS", "")
    METHODS.pop("mine")
    assert "--grip" not in call("run", "--help").out


def test_without_a_grid_rate_and_decay_are_tried(
    plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKUP_METHODS", "my_methods")
    tried = trials("mine")
    assert len(tried) == 12
    assert all(settings.keys() == {"lr", "weight_decay"} for settings in tried)


def test_an_unknown_method_is_refused() -> None:
    message = "no method 'magic', only rank, finetune, .*; to add one, register .* RANKUP_METHODS"
    with pytest.raises(RankupError, match=message):
        method_class("magic")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("import nothing_like_it", "ModuleNotFoundError: No module named 'nothing_like_it'"),
        ("1 +", "SyntaxError"),
        (PLUGIN.replace('"mine"', '"ewc"'), "there is already a method 'ewc': give"),
        (PLUGIN.replace("grip", "lr"), "'lr' is a field of every recipe: give this option of mine"),
        (PLUGIN.replace("int = 3", "list = None"), "the option 'plain' of mine must have a number"),
        (PLUGIN.replace('"lr"', '"rate"'), "mine overrides what no recipe has: {'rate': 0.02}"),
        (
            PLUGIN.replace('"mine"', '"a/b"'),
            "a method's name must be of letters, digits",
        ),
        (PLUGIN.replace("options=MineOptions", "options=dict"), "must be a dataclass derived from"),
    ],
)
def test_a_plugin_that_fails_is_named(
    content: str, reason: str, plugin: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin.write_text(content)
    monkeypatch.setenv("RANKUP_METHODS", "my_methods.py")
    done = call("methods")
    assert done.code == 1
    assert "'my_methods.py', named in RANKUP_METHODS, cannot be imported" in done.err
    assert reason in done.err
    assert list(METHODS)[-1] != "mine"


@pytest.mark.parametrize("place", ["nowhere.py", "nowhere"])
def test_a_missing_plugin_is_named(place: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKUP_METHODS", place)
    done = call("run", "--method", "mine")
    assert done.code == 1
    assert f"rankup: '{place}', named in RANKUP_METHODS, cannot be imported: " in done.err


def test_a_class_defined_again_replaces_the_first() -> None:
    for help in ("one", "two"):

        @register("mine", help=help)
        class Mine(FineTune): ...

    assert method_info("mine").help == "two"
    with pytest.raises(RankupError, match="already a method 'mine': give .*Other another name"):

        @register("mine", help="three")
        class Other(FineTune): ...


@pytest.mark.parametrize(
    ("name", "default", "reason"),
    [("out", "x", "--out is an option of the command"), ("strength", "x", "--strength has one ty")],
)
def test_flags_that_clash_get_a_sentence(name: str, default: str, reason: str, call: Call) -> None:
    kind = dataclass(frozen=True)(
        type("Clashing", (Options,), {name: option(default, "x"), "__annotations__": {name: str}})
    )
    register("mine", help="", options=kind)(FineTune)
    done = call("run", "--method", "mine")
    assert done.code == 1
    assert reason in done.err


def test_listing_built_in_methods_does_not_load_torch() -> None:
    code = "import sys; import rankup.methods.search as s; s.trials('ewc'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "rankup.methods.registry" in done.stdout.split()
    assert "torch" not in done.stdout.split()

"""Bad input on the command line gets one sentence and a non-zero exit."""

import re
from pathlib import Path

import pytest

from helpers.calling import Call

REFUSED = {
    "stream": (
        ["run", "--stream", "p-digit"],
        "there is no stream 'p-digit' .did you mean p-digits",
    ),
    "method": (["run", "--method", "magic"], "there is no method 'magic', only rank, finetune"),
    "recipe": (["run", "--recipe", "best"], "there is no recipe 'best', only default, paper"),
    "optimiser": (
        ["run", "--method", "agem", "--optimiser", "adam", "--out", "x"],
        "agem projects the gradient, so it needs the optimiser .* sgd, not adam",
    ),
    "schedule": (["run", "--schedule", "linear"], "schedule must be one of one-cycle, constant"),
    "rank": (["run", "--rank", "11"], "rank must be written like 11,1 or 0.1,0.02"),
    "negative rank": (["run", "--rank", "-1,1"], "first must not be negative, got -1"),
    "no factors": (["run", "--rank", "0,0"], "first=0 needs seeded factors"),
    "tasks": (["run", "--tasks", "0"], "tasks must be a whole number of at least 1, got 0"),
    "missing data": (["run", "--stream", "p-mnist"], "--data"),
    "diverging": (
        ["run", "--lr", "1e30", "--tasks", "1", "--out", "x"],
        "'permutation 01' diverged",
    ),
    "cropped": (
        ["run", "--crop", "9", "--out", "x"],
        "images of 8×8 pixels can be padded by reflection by 0 to 7 pixels, got 9",
    ),
    "a file": (["run", "--out", "file"], "file is a file, not a folder: name a folder with --out"),
    "no run": (["report", "nowhere"], "nowhere"),
    "no network": (["info", "nowhere"], "there is no folder nowhere"),
    "no factors at all": (
        ["run", "--method", "ewc", "--rank", "3,1"],
        "--rank is for the method rank, ewc has no factors",
    ),
    "no factors to start": (
        ["run", "--method", "hat", "--first-factors", "3"],
        "--first-factors is for the method rank, hat has no factors",
    ),
    "nobody to soften": (
        ["run", "--softness", "2"],
        "--softness is for learning from a teacher: name one with --teacher",
    ),
    "too large": (
        ["run", "--width", str(10**15), "--tasks", "1", "--out", "x"],
        "there is too little memory for it$",
    ),
    "no results": (
        ["paper", "accuracy", "--show", "--results", "nowhere"],
        "there is no results folder nowhere",
    ),
    "nothing to run": (
        ["paper", "accuracy", "--show", "--only", "ewc"],
        "--only chooses what to run, but --show runs",
    ),
    "results in a file": (["paper", "--results", "file"], "must be a folder, but file is a file"),
    "a page of nothing": (["paper", "--page", "x.md"], "--page needs a table or figure: name"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_gets_one_sentence(
    case: str, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, message = REFUSED[case]
    Path("file").touch()
    done = call(*arguments)
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert re.match(f"rankup: .*{message}", done.err), done.err
    assert "what was learned before" not in done.err  # there is nothing
    if case in ("optimiser", "cropped"):  # nothing is in the way of another try
        assert not Path("x").exists()


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (
            "run --net vgg",
            r"'--net': .* one of mlp, resnet18, timm:NAME, .* got 'vgg'.* \(see rankup run --help",
        ),
        ("run --width -3", "'--width': .*got '-3'|'--width': -3 is not"),
        ("run --width=0", "'--width': .*got '0'|'--width': 0 is not"),
        ("run --epochs 1.5", "'--epochs': .*'1.5'"),
        ("run --epochs", "'--epochs' requires an argument"),
        ("run --nope 3", "no such option.*--nope"),
        ("rnu", "no such command 'rnu'.*see rankup --help"),
        ("report", "missing argument"),
        ("methods more", "unexpected extra argument"),
    ],
)
def test_unknown_words_are_named_in_one_line(typed: str, says: str, call: Call) -> None:
    done = call(*typed.split())
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(f"rankup: .*({says}).*\n", done.err), done.err


def test_too_long_names_are_refused(call: Call) -> None:
    name = 300 * "a"
    for arguments in (("info", name), ("report", name), ("run", "--stream", f"split:{name}")):
        done = call(*arguments)
        assert done.code == 1
        assert re.fullmatch(f"rankup: {name}.* cannot be used: File name too long\n", done.err)

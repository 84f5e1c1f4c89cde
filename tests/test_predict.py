"""`rankup predict`: images go the way to the network that they went when it was taught."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from calling import Call, Done
from pictures import encoded, pictures
from rankup.data.folders import every_fifth
from test_own_images import own_images

CLASSES = ("ant", "bee", "cow", "dog")


def learned(call: Call, folder: Path, *options: object, stream: str = "") -> Path:
    images = own_images(folder / "images", *CLASSES)
    words = ("--stream", f"split:{images}{stream}", "--tasks", 2, "--epochs", 40, *options)
    done = call("run", *words, "--out", folder / "run")
    assert done.code == 0, done.err
    return folder / "run"


def lines(run: Path) -> list[dict[str, list[str]]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]


def held_back(images: Path, classes: Sequence[str]) -> list[Path]:
    """The images that a task was tested with."""
    found = []
    for name in classes:
        files = sorted((images / name).iterdir(), key=lambda file: file.name)
        chosen = every_fifth(np.zeros(len(files), dtype=np.int64))
        found += [file for file, test in zip(files, chosen, strict=True) if test]
    return found


@pytest.mark.parametrize(
    ("options", "stream"),
    [
        ((), ""),
        (("--pixels", "centred"), "@9"),
        (("--net", "resnet18", "--width", 4, "--rank", "2,1"), "@12"),
    ],
)
def test_what_is_predicted_is_what_was_measured(
    options: tuple[object, ...], stream: str, call: Call, tmp_path: Path
) -> None:
    run = learned(call, tmp_path, *options, stream=stream)
    last = lines(run)[-1]["accuracy"]
    for number, line in enumerate(lines(run)):
        files = held_back(tmp_path / "images", line["classes"])
        done = call("predict", run, *files, "--task", line["task"], "--plain")
        assert done.code == 0, done.err
        said = [row.split("\t") for row in done.out.splitlines()]
        assert [name for name, _, _ in said] == [str(file) for file in files]
        right = [row[1] == file.parent.name for row, file in zip(said, files, strict=True)]
        assert sum(right) / len(right) == pytest.approx(last[number])
        assert all(0.5 <= float(share) <= 1 for _, _, share in said)


@pytest.fixture
def run(call: Call, tmp_path: Path) -> Path:
    return learned(call, tmp_path)


def test_a_table_names_the_class_and_the_next_best(call: Call, run: Path) -> None:
    one, other = lines(run)[1]["classes"]
    file = run.parent / "images" / one / "1.png"
    for name in ("2", "split 02"):
        done = call("predict", run, file, "--task", name)
        assert done.code == 0
        assert one in done.out
        assert f"{other} (" in done.out


def refused(done: Done, sentence: str) -> None:
    assert done.code == 1
    assert sentence in " ".join(done.err.split())
    assert len(done.err.splitlines()) == 1


def test_what_cannot_be_answered_is_said(call: Call, run: Path) -> None:
    file = run.parent / "images" / "ant" / "1.png"
    classes = ", ".join(lines(run)[0]["classes"])
    refused(call("predict", run, file), f"name one with --task: 'split 01' ({classes}),")
    refused(call("predict", run, file, "--task", "3"), "knows no task '3', only 'split 01'")
    refused(call("predict", run, run / "no.png", "--task", "1"), "no.png cannot be read: No such")
    refused(call("predict", run, run / "config.json", "--task", "1"), "the image is broken or of")
    refused(call("predict", run / "net", file, "--task", "1"), "is no folder of a run")
    large = run.parent / "large.png"
    large.write_bytes(encoded(pictures(1, 9, 8, seed=0)[0]))
    refused(call("predict", run, large, "--task", "1"), "large.png: the image is")


def test_runs_of_other_streams_and_methods_are_refused(call: Call, tmp_path: Path) -> None:
    file = own_images(tmp_path / "images") / "a" / "1.png"
    for word in ("rank", "finetune"):
        words = ("--method", word, "--tasks", 2, "--epochs", 2, "--out", tmp_path / word)
        assert call("run", "--stream", "p-digits", *words).code == 0
    refused(call("predict", tmp_path / "rank", file), "changes the images in its own way")
    refused(call("predict", tmp_path / "finetune", file), "is a run of finetune, only a run of")
    shutil.rmtree(tmp_path / "rank" / "net")
    refused(call("predict", tmp_path / "rank", file), "changes the images")
